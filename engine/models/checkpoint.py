"""From a name to a checkpoint whose files were found and whose config was read; what it can't be asked for is refused here.

transformers is not imported here: it takes seconds, and a model of the Llama-shaped family starts without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagestream.engine.core.config import ModelConfig
from pagestream.engine.core.errors import StartError
from pagestream.engine.models.decoder_config import decoder_spec, eos_token_ids, is_decoder, max_positions, with_defaults
from pagestream.engine.models.gguf_config import gguf_config
from pagestream.engine.models.gguf_file import GgufFile
from pagestream.engine.models.linear_blocks import BITS, GROUP
from pagestream.engine.models.sources import ModelFiles, find_model
from pagestream.engine.models.tensor_source import FLOATS, DummySource, GgufSource, SafetensorsSource, TensorSource, read_json


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model whose files were found and whose config was read; no weight is in memory yet."""

    files: ModelFiles
    config: dict[str, Any]  # as config.json has it; a GGUF file's metadata in the same terms
    generation: dict[str, Any]  # generation_config.json; empty where there is none
    dtype: torch.dtype  # of the weights once loaded
    source: TensorSource | None  # None: only transformers can read it
    max_model_len: int | None  # as asked for
    quantization: str = "auto"  # as asked for; see ModelConfig

    @property
    def bits(self) -> int | None:
        """What linears are converted to; None: they are not."""
        return BITS.get(self.quantization)

    @property
    def is_decoder(self) -> bool:
        """Whether `load_decoder` loads it; all others are for engine.models.hf."""
        return self.source is not None

    def eos_token_ids(self, vocab_size: int) -> frozenset[int]:
        return eos_token_ids(self.config, self.generation, vocab_size)


def open_checkpoint(config: ModelConfig) -> Checkpoint:
    """Find the files, fetching them where needed, and read what they say of themselves.

    dtype "auto" is the checkpoint's own float type; bfloat16 for a GGUF file.
    Raises StartError with one line that says what to do.
    """
    files = find_model(config)
    if files.gguf is not None:
        file = GgufFile(files.gguf)
        model_config, generation = gguf_config(file), {}
        own_dtype = torch.bfloat16
        dummy = config.load_format == "dummy"
        source: TensorSource | None = DummySource(model_config, config.seed or 0) if dummy else GgufSource(file, model_config)
    else:
        assert files.folder is not None
        model_config = read_json(files.folder / "config.json")
        generation_file = files.folder / "generation_config.json"
        generation = read_json(generation_file) if generation_file.is_file() else {}
        if quantised := model_config.get("quantization_config"):
            method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
            raise StartError(f"{files.folder} is a checkpoint quantised with {method}, which is not supported")
        source = open_weights(files.folder, model_config, config)
        own_dtype = stored_dtype(model_config, source)
    check_length(config, model_config)
    check_columns(config, model_config)
    return Checkpoint(
        files=files,
        config=model_config,
        generation=generation,
        dtype=own_dtype if config.dtype == "auto" else FLOATS[config.dtype],
        source=source,
        max_model_len=config.max_model_len,
        quantization=config.quantization,
    )


def open_weights(folder: Path, model_config: dict[str, Any], config: ModelConfig) -> TensorSource | None:
    """None for what the lean decoder does not compute, or can't read because it is pickled."""
    if not is_decoder(model_config):
        if config.load_format != "dummy" and any(folder.glob("*.safetensors")):
            source = SafetensorsSource(folder)
            with source.opened:
                source.check_weights()
        return None
    if config.load_format == "dummy":
        return DummySource(model_config, config.seed or 0)
    if not any(folder.glob("*.safetensors")) and any(folder.glob("pytorch_model*.bin")):
        return None
    return SafetensorsSource(folder)


def stored_dtype(model_config: dict[str, Any], source: TensorSource | None) -> torch.dtype:
    named = model_config.get("dtype") or model_config.get("torch_dtype")
    if isinstance(named, str) and named in FLOATS:
        return FLOATS[named]
    if isinstance(source, SafetensorsSource) and source.has("model.embed_tokens.weight"):
        stored = source.dtype("model.embed_tokens.weight")
        return torch.float32 if stored == torch.float64 else stored
    return torch.float32


def check_length(config: ModelConfig, model_config: dict[str, Any]) -> None:
    if config.max_model_len is None or not is_decoder(model_config):
        return
    positions = max_positions(with_defaults(model_config))
    if config.max_model_len > positions:
        raise StartError(f"max_model_len {config.max_model_len} is more than the {positions} positions that the model knows")


def check_columns(config: ModelConfig, model_config: dict[str, Any]) -> None:
    """Refuse to convert what does not come in blocks of 32, before anything is loaded."""
    if config.quantization not in BITS or not is_decoder(model_config):
        return
    spec = decoder_spec(model_config, config.max_model_len)
    sizes = {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size, "its heads": spec.num_heads * spec.head_size}
    for name, size in sizes.items():
        if size % GROUP:
            raise StartError(f"quantization {config.quantization} needs multiples of {GROUP}, and {name} is {size}; leave it out")
