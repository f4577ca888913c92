"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagestream.engine.core.config import ModelConfig
from pagestream.engine.models.sources import find_model
from tests.tiny_models import make_checkpoint


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, with its tokenizer; fetched once and kept in the user's cache folder."""
    return find_model(ModelConfig()).model


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> Any:
    """The default model as transformers computes it, in float32; loaded once, and changed by nobody."""
    from tests.oracle import load_default_model  # brings transformers with it

    return load_default_model(smollm2_path)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three small layers with a tokenizer of 320 tokens, for tests that need an engine and not its English."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("tiny_llama"))
