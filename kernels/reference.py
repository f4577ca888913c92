"""Every op of this folder in plain torch, written for clarity: the oracle of all kernels.

All of it computes and returns float64 (the 8-bit codes excepted), knows nothing of tiles or splits, and loops where a loop
says it best.  Nothing here is meant to be fast, and nothing on the serving path may call it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagestream.kernels.kv_format import MAX_CODE, head_size_of, is_quantised, scales_view


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The normalised rows, and residual + x as it is stored."""
    total = x.double() if residual is None else (x.double() + residual.double()).to(x.dtype).double()
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps)
    return normed * weight.double(), total


def swiglu(gate_up: Tensor, *, activation: str = "silu") -> Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    acted = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    return acted * up


def copy_blocks(sources: list[Tensor], targets: list[Tensor], pairs: Tensor) -> None:
    for source, target in zip(sources, targets, strict=True):
        for source_id, target_id in pairs.tolist():
            target[target_id] = source[source_id]


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """Rotary in the half-split layout.  x [T, heads, D]; table [P, R] as kernels.reshape_and_cache.rotary_table makes it."""
    cos, sin = table.double()[positions].chunk(2, dim=-1)
    half = cos.shape[-1]
    a, b, rest = x.double().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales, one scale per row of the last axis."""
    scale = (x.double().abs().amax(-1) / MAX_CODE[dtype]).clamp_min(1e-30).float()
    codes = (x.double() / scale.double()[..., None]).clamp(-MAX_CODE[dtype], MAX_CODE[dtype])
    return (codes.add(0.5).floor() if dtype == torch.int8 else codes).to(dtype), scale


def read_pages(cache: Tensor) -> Tensor:
    """What a page tensor holds: [B, G, K, D] float64."""
    if not is_quantised(cache.dtype):
        return cache.double()
    num_blocks, num_heads, block_size, _ = cache.shape
    size = head_size_of(cache)
    stored = cache.flatten(2)[:, :, : block_size * size].view(num_blocks, num_heads, block_size, size)
    codes = stored.view(torch.uint8).double() - 128 if cache.dtype == torch.int8 else stored.double()
    return codes * scales_view(cache)[:, :, block_size * size // 4 :].double()[..., None]


def write_pages(cache: Tensor, slots: Tensor, x: Tensor) -> None:
    """Write x [T, G, D] into the slots; -1 is skipped."""
    num_heads, block_size, size = cache.shape[1], cache.shape[2], head_size_of(cache)
    for slot, row in zip(slots.tolist(), x, strict=True):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        if not is_quantised(cache.dtype):
            cache[block, :, offset] = row.to(cache.dtype)
            continue
        codes, scales = quantise(row, cache.dtype)
        for head in range(num_heads):
            flat = cache[block, head].flatten().view(torch.int8)
            stored = codes[head].view(torch.int8)
            flat[offset * size : (offset + 1) * size] = stored ^ -128 if cache.dtype == torch.int8 else stored
            flat.view(torch.float32)[block_size * size // 4 + offset] = scales[head]


def reshape_and_cache(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *,
    positions: Tensor | None = None, table: Tensor | None = None,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Write K and V, and return q as attention should see it."""
    q_out, k_out = q.double(), k.double()
    if q_norm is not None and k_norm is not None:
        q_out, k_out = rms_norm(q_out, q_norm, eps)[0], rms_norm(k_out, k_norm, eps)[0]
    if positions is not None and table is not None:
        q_out, k_out = rotate(q_out, positions, table), rotate(k_out, positions, table)
    write_pages(k_cache, slots, k_out)
    write_pages(v_cache, slots, v.double())
    return q_out


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, query_start: Tensor, *,
    scale: float, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend every query token to the keys of its own sequence up to its own position.  Returns [T, H, D] float64.

    q [T, H, D]; query_start [S + 1]; rows of q that belong to no sequence come back as zeros.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    keys, values = read_pages(k_cache), read_pages(v_cache)
    group, block_size = q.shape[1] // k_cache.shape[1], k_cache.shape[2]
    for s, seq_len in enumerate(seq_lens.tolist()):
        first, last = int(query_start[s]), int(query_start[s + 1])
        if first == last:
            continue
        blocks = block_tables[s, : math.ceil(seq_len / block_size)].long()
        k = keys[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].repeat_interleave(group, dim=0)  # [H, seq_len, D]
        v = values[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len].repeat_interleave(group, dim=0)
        scores = torch.einsum("qhd,hkd->hqk", q[first:last].double(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        position = torch.arange(seq_len - (last - first), seq_len)[:, None]
        key_position = torch.arange(seq_len)[None, :]
        seen = key_position <= position
        if window is not None:
            seen &= key_position > position - window
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            extra = sinks.double()[:, None, None].expand(-1, last - first, 1)
            weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out[first:last] = torch.einsum("hqk,hkd->qhd", weights, v)
    return out


def philox(seed: int, counters: tuple[int, int, int, int], rounds: int) -> int:
    """The first word of Philox 4x32.  Source: Salmon et al. 2011, Parallel Random Numbers: As Easy as 1, 2, 3."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = (c & mask for c in counters)
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(rounds):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & mask, (a >> 32) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0


def gumbel(seed: int, position: int, vocab_size: int) -> Tensor:
    """The noise of every token of one row."""
    words = torch.tensor([philox(seed, (token, position, 0, 0), 7) for token in range(vocab_size)])
    return -torch.log(-torch.log(((words >> 8).double() + 0.5) / 2**24))


def processed_logits(
    logits: Tensor, *, biases: dict[int, float], counts: Tensor | None, in_prompt: Tensor | None, allowed: Tensor | None,
    repetition: float, frequency: float, presence: float,
) -> Tensor:  # fmt: skip
    """One row [V] after bias, penalties and mask."""
    x = logits.double()
    for token, bias in biases.items():
        x[token] += bias
    if counts is not None and in_prompt is not None:
        said = (counts > 0) | in_prompt
        x = torch.where(said, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * counts - presence * (counts > 0)
    return x if allowed is None else x.masked_fill(~allowed, -math.inf)


def kept_tokens(scores: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens of one row of scores [V] survive top-k, then top-p of what is left, then min-p; by sorting."""
    order = scores.sort(descending=True, stable=True).indices
    keep = torch.zeros(len(scores), dtype=torch.bool)
    chosen = order[:top_k] if top_k > 0 else order
    probabilities = scores[chosen].softmax(0)
    before = probabilities.cumsum(0) - probabilities
    chosen = chosen[(before < top_p) | (torch.arange(len(chosen)) == 0)]
    keep[chosen] = True
    floor = scores.max() + (math.log(min_p) if min_p > 0 else -math.inf)
    return keep & (scores >= floor)


def sampling_scores(x: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> Tensor:
    """The noisy scores of one row of processed logits; a sampler must choose their maximum."""
    if temperature < 1e-5:
        return x
    scores = x / temperature
    keep = kept_tokens(scores, top_k=top_k, top_p=top_p, min_p=min_p)
    return (scores + gumbel(seed, position, len(x))).masked_fill(~keep, -math.inf)


def quant_matmul(x: Tensor, codes: Tensor, scales: Tensor, minimums: Tensor) -> Tensor:
    """x [T, K] times the transpose of scale * code + minimum; codes [N, K], scales and minimums [N, K / group]."""
    group = codes.shape[1] // scales.shape[1]
    weight = codes.double() * scales.double().repeat_interleave(group, 1) + minimums.double().repeat_interleave(group, 1)
    return x.double() @ weight.t()
