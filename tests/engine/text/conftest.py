from __future__ import annotations

from pathlib import Path

import pytest

from pagestream.engine.models.gguf_file import GgufFile
from pagestream.engine.text.gguf_tokenizer import from_gguf_metadata
from pagestream.engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, object]:
    file = GgufFile(smollm2_path)
    return {key: file.get(key) for key in file.values if key.startswith("tokenizer.")}


@pytest.fixture(scope="session")
def tokenizer(smollm2_metadata: dict[str, object]) -> Tokenizer:
    return from_gguf_metadata(smollm2_metadata)
