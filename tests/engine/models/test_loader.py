"""Opening checkpoints and loading the Llama-shaped family."""

from __future__ import annotations

from pathlib import Path

import torch

from pagestream.engine.core.config import ModelConfig
from pagestream.engine.models.loader import load_decoder, open_checkpoint
from tests.engine.models.oracle import CPU


def test_dummy_weights_come_from_the_config_alone_and_from_the_seed(tmp_path: Path, checkpoints: dict[str, Path]) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints["qwen2"] / "config.json").read_bytes())

    def weights(seed: int) -> torch.Tensor:
        checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path), load_format="dummy", seed=seed))
        return load_decoder(checkpoint, device=CPU, dtype=checkpoint.dtype).weights.layers[1].qkv

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert 0.3 < float(weights(1).std()) < 0.4  # initializer_range
