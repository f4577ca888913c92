"""What tests of several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagestream.engine.core.config import ModelConfig
from pagestream.engine.models.sources import find_model


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, with its tokenizer; fetched once and kept in the user's cache folder."""
    return find_model(ModelConfig()).model
