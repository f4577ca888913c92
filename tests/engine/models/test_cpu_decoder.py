"""The fused CPU decoder against a float64 computation of the same spec, and its rows against themselves in other company."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata, LayerCache
from pagestream.engine.core.errors import StartError
from pagestream.engine.core.model_shape import ModelShape
from pagestream.engine.models.base import DecoderSpec, DecoderWeights, LayerWeights, RotarySpec
from pagestream.engine.models.cpu_decoder import CpuDecoder
from pagestream.kernels.cpu.ops import CpuOps, GgufBlocks, load_ops
from pagestream.kernels.kv_format import page_width

BLOCK_SIZE = 16
PLAIN = DecoderSpec(
    hidden_size=96,
    intermediate_size=144,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_size=16,
    vocab_size=200,
    rms_norm_eps=1e-5,
    rotary=RotarySpec(10_000.0 ** (-torch.arange(0, 16, 2) / 16), 16),
    attention_scale=0.25,
    windows=(None, None),
)
SPECS = {
    "plain": PLAIN,
    "gelu, odd sizes": dataclasses.replace(PLAIN, activation="gelu_tanh", intermediate_size=50, hidden_size=72),
    "partial rotary, scaled": dataclasses.replace(
        PLAIN, rotary=RotarySpec(10_000.0 ** (-torch.arange(0, 6, 2) / 6), 6, attention_factor=1.3)
    ),
    "windows, wide heads": dataclasses.replace(PLAIN, windows=(12, None), head_size=40, num_kv_heads=6),
}


@pytest.fixture(scope="module", autouse=True)
def torch_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ops() -> CpuOps:
    found = load_ops(2)
    assert found is not None, "these tests need a C++ compiler"
    return found


def make_weights(spec: DecoderSpec, dtype: torch.dtype, *, extras: bool, tied: bool) -> DecoderWeights:
    """`extras`: biases and norms of Q and K."""
    generator = torch.Generator().manual_seed(3)

    def rand(*sizes: int, around: float = 0.0, spread: float = 1.0) -> Tensor:
        return (around + spread * torch.randn(*sizes, generator=generator)).to(dtype)

    hidden, head = spec.hidden_size, spec.head_size
    qkv_size = (spec.num_heads + 2 * spec.num_kv_heads) * head
    layers = [
        LayerWeights(
            input_norm=rand(hidden, around=1, spread=0.2),
            qkv=rand(qkv_size, hidden, spread=hidden**-0.5),
            qkv_bias=rand(qkv_size, spread=0.3) if extras else None,
            q_norm=rand(head, around=1, spread=0.2) if extras else None,
            k_norm=rand(head, around=1, spread=0.2) if extras else None,
            o=rand(hidden, spec.num_heads * head, spread=hidden**-0.5),
            o_bias=rand(hidden, spread=0.3) if extras else None,
            post_norm=rand(hidden, around=1, spread=0.2),
            gate_up=rand(2 * spec.intermediate_size, hidden, spread=hidden**-0.5),
            down=rand(hidden, spec.intermediate_size, spread=hidden**-0.5),
        )
        for _ in range(spec.num_layers)
    ]
    embedding = rand(spec.vocab_size, hidden)
    head_weight = embedding if tied else rand(spec.vocab_size, hidden)
    return DecoderWeights(embedding, layers, rand(hidden, around=1, spread=0.2), head_weight)


def shape_of(spec: DecoderSpec) -> ModelShape:
    return ModelShape(spec.vocab_size, 512, spec.num_layers, spec.num_kv_heads, spec.head_size, frozenset({0}))


def reference(spec: DecoderSpec, weights: DecoderWeights, tokens: Tensor) -> Tensor:
    """Logits of one whole sequence in float64, [T, V]."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight.double()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ weight.double().T + (0 if bias is None else bias.double())

    positions = torch.arange(len(tokens))
    angles = positions[:, None].double() * spec.rotary.inv_freq.double()
    cos, sin = (f[:, None] * spec.rotary.attention_factor for f in (angles.cos(), angles.sin()))

    def rotate(x: Tensor) -> Tensor:
        a, b, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - spec.rotary.rotary_dim], dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)

    x = weights.embedding.double()[tokens]
    for layer, window in zip(weights.layers, spec.windows, strict=True):
        heads = linear(norm(x, layer.input_norm), layer.qkv, layer.qkv_bias).view(len(tokens), -1, spec.head_size)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        group = spec.num_heads // spec.num_kv_heads
        k, v = rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("thd,lhd->htl", rotate(q), k) * spec.attention_scale
        seen = positions[None] <= positions[:, None]
        if window is not None:
            seen &= positions[None] > positions[:, None] - window
        attended = torch.einsum("htl,lhd->thd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)
        x = x + linear(attended.flatten(1), layer.o, layer.o_bias)
        gate, up = linear(norm(x, layer.post_norm), layer.gate_up).chunk(2, -1)
        act = torch.nn.functional.silu(gate) if spec.activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
        x = x + linear(act * up, layer.down)
    return linear(norm(x, weights.final_norm), weights.head)


class Pages:
    """Pages full of NaN, and sequences that own blocks of them in turn."""

    def __init__(self, model: CpuDecoder, num_seqs: int, max_len: int) -> None:
        shape, self.model = model.shape, model
        self.width = math.ceil(max_len / BLOCK_SIZE)
        sizes = (num_seqs * self.width, shape.num_kv_heads, BLOCK_SIZE, page_width(shape.head_size, model.kv_dtype))
        pages = torch.empty(sizes, dtype=model.kv_dtype)
        pages.view(torch.uint8).fill_(255)  # NaN
        self.cache = [LayerCache(pages.clone(), pages.clone()) for _ in range(shape.num_layers)]
        order = torch.randperm(num_seqs * self.width, generator=torch.Generator().manual_seed(0))
        self.tables = order.view(num_seqs, self.width)

    def step(self, parts: dict[int, tuple[int, Tensor]]) -> dict[int, Tensor]:
        """parts: sequence -> (first position, tokens).  Returns the logits of each."""
        positions = torch.cat([torch.arange(start, start + len(tokens)) for start, tokens in parts.values()])
        counts = torch.tensor([len(tokens) for _, tokens in parts.values()])
        ends = torch.tensor([start + len(tokens) for start, tokens in parts.values()])
        tables = self.tables[list(parts)]
        of_token = tables.repeat_interleave(counts, 0).gather(1, positions[:, None] // BLOCK_SIZE)[:, 0]
        metadata = AttentionMetadata(
            positions=positions,
            slot_mapping=of_token * BLOCK_SIZE + positions % BLOCK_SIZE,
            query_start=torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int(),
            seq_lens=ends.int(),
            block_tables=tables.int(),
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
        )
        hidden = self.model.forward(torch.cat([tokens for _, tokens in parts.values()]), self.cache, metadata)
        return dict(zip(parts, self.model.logits(hidden).split(counts.tolist()), strict=True))


def prompt(spec: DecoderSpec, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, spec.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.float32, None, 1e-5),
        (torch.bfloat16, None, 2e-2),
        (torch.float32, torch.int8, 2e-2),
        (torch.float32, torch.float8_e4m3fn, 1e-1),
    ],
)
def test_logits_equal_float64(ops, name, extras, dtype, kv_dtype, tolerance):
    spec = SPECS[name]
    weights = make_weights(spec, dtype, extras=extras, tied=extras)
    tokens = prompt(spec, 45)
    expected = reference(spec, weights, tokens)
    model = CpuDecoder(spec, weights, shape_of(spec), ops, kv_dtype=kv_dtype)
    logits = Pages(model, 1, 45).step({0: (0, tokens)})[0].double()
    assert ((logits - expected).norm() / expected.norm()).item() < tolerance


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.int8), (torch.bfloat16, torch.float8_e4m3fn)],
)
def test_logits_are_the_same_bits_in_any_chunk_and_company(ops, name, dtype, kv_dtype):
    spec = SPECS[name]
    model = CpuDecoder(spec, make_weights(spec, dtype, extras=True, tied=False), shape_of(spec), ops, kv_dtype=kv_dtype)
    tokens = [prompt(spec, length, seed) for seed, length in enumerate((90, 33, 1, 70))]
    alone = Pages(model, 4, 90).step({0: (0, tokens[0])})[0]
    for chunk in (1, 5, 16, 64):
        pages, done, logits = Pages(model, 4, 90), [0] * 4, []
        while done[0] < 90:
            parts = {s: (done[s], tokens[s][done[s] : done[s] + chunk]) for s in (3, 0, 1, 2) if done[s] < len(tokens[s])}
            logits.append(pages.step(parts)[0])
            done = [count + chunk for count in done]
        assert torch.equal(torch.cat(logits), alone), chunk


def test_quantised_weights_give_the_bits_of_the_dequantised_ones(ops):
    spec = dataclasses.replace(PLAIN, intermediate_size=160)
    dense = make_weights(spec, torch.bfloat16, extras=True, tied=True)
    blocks = copy.deepcopy(dense)
    for layer, quantised_layer in zip(dense.layers, blocks.layers, strict=True):
        for name in ("qkv", "o", "gate_up", "down"):
            quantised, weight = quantise(getattr(layer, name), "Q4_1")
            setattr(layer, name, weight)
            setattr(quantised_layer, name, quantised)
    quantised_head, dense.embedding = quantise(dense.head, "Q8_0")
    dense.head = dense.embedding
    setattr(blocks, "head", quantised_head)  # noqa: B010 -- a weight that is no tensor
    setattr(blocks, "embedding", quantised_head)  # noqa: B010
    logits = []
    for weights in (dense, blocks):
        pages = Pages(CpuDecoder(spec, weights, shape_of(spec), ops), 1, 71)
        logits.append(torch.cat([pages.step({0: (0, prompt(spec, 70))})[0], pages.step({0: (70, prompt(spec, 1))})[0]]))
    assert torch.equal(logits[0], logits[1])


def quantise(weight: Tensor, kind: str) -> tuple[GgufBlocks, Tensor]:
    """The blocks of a weight, and what they hold, in bfloat16."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(weight.float().numpy(), number)
    return GgufBlocks(kind, torch.from_numpy(data)), torch.from_numpy(gguf.quants.dequantize(data, number)).to(torch.bfloat16)


def test_number_of_threads_changes_no_bit():
    weights = make_weights(PLAIN, torch.bfloat16, extras=False, tied=True)
    logits = []
    for threads in (1, 2, 3):
        ops = load_ops(threads)
        assert ops is not None
        model = CpuDecoder(PLAIN, copy.deepcopy(weights), shape_of(PLAIN), ops)
        logits.append(Pages(model, 1, 300).step({0: (0, prompt(PLAIN, 300))})[0])
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_weights_are_taken_over(ops):
    weights = make_weights(PLAIN, torch.bfloat16, extras=False, tied=True)
    expected = sum(w.nbytes for layer in weights.layers for w in (layer.qkv, layer.o, layer.gate_up, layer.down))
    model = CpuDecoder(PLAIN, weights, shape_of(PLAIN), ops)
    assert weights.layers[0].qkv is None
    assert weights.layers[1].down is None
    assert expected < model.shape.weight_bytes < 1.5 * expected + weights.head.nbytes


def test_step_without_tokens_is_empty(ops):
    model = CpuDecoder(PLAIN, make_weights(PLAIN, torch.float32, extras=False, tied=False), shape_of(PLAIN), ops)
    empty = torch.empty(0, dtype=torch.int64)
    metadata = AttentionMetadata(empty, empty, torch.zeros(1).int(), empty.int(), torch.empty(0, 1).int(), 0, 0)
    hidden = model.forward(empty, Pages(model, 1, 16).cache, metadata)
    assert hidden.shape == (0, PLAIN.hidden_size)
    assert model.logits(hidden).shape == (0, PLAIN.vocab_size)


def test_unknown_token_is_refused_and_writes_nothing(ops):
    model = CpuDecoder(PLAIN, make_weights(PLAIN, torch.float32, extras=False, tied=False), shape_of(PLAIN), ops)
    pages = Pages(model, 1, 16)
    with pytest.raises(ValueError, match="does not exist"):
        pages.step({0: (0, torch.tensor([3, PLAIN.vocab_size]))})
    assert all(layer.k.isnan().all() for layer in pages.cache)


def test_float16_weights_are_held_as_float32(ops):
    weights = make_weights(PLAIN, torch.float16, extras=True, tied=True)
    tokens = prompt(PLAIN, 20)
    expected = reference(PLAIN, weights, tokens)
    model = CpuDecoder(PLAIN, weights, shape_of(PLAIN), ops)
    assert model.kv_dtype is torch.float32
    torch.testing.assert_close(Pages(model, 1, 20).step({0: (0, tokens)})[0].double(), expected, atol=1e-3, rtol=1e-4)


def test_float16_pages_are_refused(ops):
    weights = make_weights(PLAIN, torch.float16, extras=False, tied=True)
    with pytest.raises(StartError, match="kv_cache_dtype"):
        CpuDecoder(PLAIN, weights, shape_of(PLAIN), ops, kv_dtype=torch.float16)
