"""What every client library is asked to do over the real engine and a tiny checkpoint: the questions, not their notation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, served
from tests.tiny_models import make_checkpoint

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": WEATHER}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}
MESSAGES = [{"role": "user", "content": "Hello"}]


@contextmanager
def tiny_server(folder: Path) -> Iterator[Live]:
    """With room for the tools' description, which takes many tokens of a tiny vocabulary."""
    checkpoint = make_checkpoint("llama", folder, max_position_embeddings=2048)
    metrics = Metrics("m")
    args = EngineArgs(model=str(checkpoint), num_kv_blocks=256, max_num_seqs=8, device="cpu", cpu_threads=1)
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics) as server:
        yield server
