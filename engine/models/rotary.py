"""Inverse frequencies of the rotary embedding, for every scaling that the Llama-shaped family uses.

Each position has one angle for the whole life of the engine.  Two schemes were written to change theirs with the length of the
sequence; the keys in the cache could not follow that, so the choice is made here, once, from the length that is served:
  longrope   the long factors if more than the original positions are served, else the short ones
  dynamic    grows beyond the model's own positions, which are never exceeded here: the same as no scaling
Sources: Su et al. 2021 (rotary); Peng et al. 2023 (YaRN); Ding et al. 2024 (LongRoPE); Llama 3.1's released parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pagestream.engine.core.errors import StartError
from pagestream.engine.models.base import RotarySpec

DEFAULT_BASE = 10_000.0
SCALED_FROM_ORIGINAL = ("llama3", "yarn", "longrope")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """One flat table from the old keys (rope_theta, rope_scaling) or the new one (rope_parameters).

    Raises StartError if the layers differ in their tables.
    """
    table = rope_table(config)
    nested = [value for value in table.values() if isinstance(value, Mapping)]
    if nested:
        if any(value != nested[0] for value in nested):
            raise StartError("layers with different rotary embeddings are not supported")
        table = dict(nested[0])
    table["rope_type"] = table.get("rope_type") or table.get("type") or "default"
    if config.get("model_type") == "phi3" and table["rope_type"] in ("su", "yarn"):
        table["rope_type"] = "longrope"  # the names that LongRoPE had before it had one
    for key in ("rope_theta", "partial_rotary_factor"):
        if table.get(key) is None and config.get(key) is not None:
            table[key] = config[key]
    original = config.get("original_max_position_embeddings")
    if table["rope_type"] in SCALED_FROM_ORIGINAL and (original or not table.get("original_max_position_embeddings")):
        table["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    return table


def rope_table(config: Mapping[str, Any]) -> dict[str, Any]:
    """As config.json has it, under either key; raises StartError where that is no table."""
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(table, Mapping):
        raise StartError(f"the model's config needs rope_parameters as a table, not {table!r}"[:200])
    return dict(table)


def rotary_spec(table: Mapping[str, Any], *, head_size: int, max_positions: int, served_positions: int) -> RotarySpec:
    """max_positions is the model's own limit, served_positions what the operator wants of it.

    Raises StartError for an unknown scaling, and for one whose parameters are missing or no numbers.
    """
    rope_type = table["rope_type"]
    if not isinstance(rope_type, str) or rope_type not in SCALINGS:
        raise StartError(f"rotary scaling {rope_type!r} is not supported (there are {', '.join(sorted(SCALINGS))})")
    rotary_dim = int(head_size * number(table, "partial_rotary_factor", 1.0))
    if not 0 < rotary_dim <= head_size or rotary_dim % 2:
        raise StartError(f"a rotary embedding of {rotary_dim} of {head_size} dimensions is not supported")
    base = number(table, "rope_theta", DEFAULT_BASE)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    try:
        inv_freq, attention_factor = SCALINGS[rope_type](table, base, exponents, max_positions, served_positions)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise StartError(f"rotary scaling {rope_type!r} has unusable parameters: {error!r}"[:200]) from error
    if not bool(inv_freq.isfinite().all()) or not math.isfinite(attention_factor):
        raise StartError(f"rotary scaling {rope_type!r} has unusable parameters: they give angles that are no numbers")
    if factors := table.get("freq_factors"):  # GGUF files hold Llama 3's scaling ready-made
        inv_freq = inv_freq / per_frequency(factors, inv_freq)
    return RotarySpec(inv_freq=inv_freq, rotary_dim=rotary_dim, attention_factor=attention_factor)


def number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise StartError(f"the model's rotary embedding needs {key} as a positive number, not {value!r}"[:200])
    return float(value)


def per_frequency(factors: Sequence[float], inv_freq: Tensor) -> Tensor:
    if len(factors) != len(inv_freq):
        raise StartError(f"the rotary embedding has {len(inv_freq)} frequencies and {len(factors)} factors for them")
    return torch.tensor(factors, dtype=torch.float32)


def unscaled(
    table: Mapping[str, Any], base: float, exponents: Tensor, max_positions: int, served_positions: int
) -> tuple[Tensor, float]:
    return 1.0 / base**exponents, 1.0


def linear(
    table: Mapping[str, Any], base: float, exponents: Tensor, max_positions: int, served_positions: int
) -> tuple[Tensor, float]:
    return 1.0 / base**exponents / table["factor"], 1.0


def llama3(
    table: Mapping[str, Any], base: float, exponents: Tensor, max_positions: int, served_positions: int
) -> tuple[Tensor, float]:
    """Long wavelengths are stretched, short ones kept, those between interpolated."""
    inv_freq = 1.0 / base**exponents
    low, high = table["low_freq_factor"], table["high_freq_factor"]
    original = table["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    keep = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * inv_freq / table["factor"] + keep * inv_freq, 1.0


def yarn(
    table: Mapping[str, Any], base: float, exponents: Tensor, max_positions: int, served_positions: int
) -> tuple[Tensor, float]:
    """Dimensions that turn often within the original length are kept, those that turn seldom are stretched."""
    original = table["original_max_position_embeddings"]
    factor = table.get("factor") or max_positions / original
    dim = 2 * len(exponents)

    def dimension_of(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(table.get("beta_fast") or 32)
    high = dimension_of(table.get("beta_slow") or 1)
    if table.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)
    positions = base**exponents
    inv_freq = 1.0 / (factor * positions) * stretched + 1.0 / positions * (1 - stretched)
    return inv_freq, yarn_attention_factor(table, factor)


def yarn_attention_factor(table: Mapping[str, Any], factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if table.get("attention_factor") is not None:
        return float(table["attention_factor"])
    if table.get("mscale") and table.get("mscale_all_dim"):
        return scale(table["mscale"]) / scale(table["mscale_all_dim"])
    return scale(1.0)


def longrope(
    table: Mapping[str, Any], base: float, exponents: Tensor, max_positions: int, served_positions: int
) -> tuple[Tensor, float]:
    """A factor of its own for each dimension."""
    original = table["original_max_position_embeddings"]
    factor = table.get("factor") or max_positions / original
    attention_factor = table.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    factors = table["long_factor"] if served_positions > original else table["short_factor"]
    return 1.0 / (per_frequency(factors, exponents) * base**exponents), float(attention_factor)


SCALINGS = {
    "default": unscaled,
    "dynamic": unscaled,
    "linear": linear,
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
}
