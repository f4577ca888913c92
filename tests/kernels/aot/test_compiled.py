"""The machine code that real launches get on four GPUs: nothing spilled, the right units, wide copies, and room to be fast.

The thresholds are those of kernels/README.md.  No GPU is needed; what is compiled is what would be launched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from pagestream.kernels.attention_plan import choose_config
from pagestream.kernels.bench_cases import (
    AttentionShape,
    Case,
    attention_case,
    copy_case,
    elementwise_cases,
    quant_matmul_case,
    sampling_case,
    unpack_case,
)
from pagestream.kernels.compilation import launches_noted
from pagestream.kernels.quant_matmul import COLS, PIECE_BYTES
from pagestream.kernels.static_analysis import (
    TARGETS,
    StaticFigures,
    compiled,
    disassembled,
    figures_of,
    innermost_loops,
    machine_code,
)

MAX_PARAMETERS = 30  # each costs time at every launch
MAX_SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
LONG_UNIT = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
# Of vLLM 0.32's unified attention, compiled the same way for heads of 128: what the loop could issue on an H200, bytes a second.
VLLM_ISSUE_BOUND, VLLM_8_BIT_ISSUE_BOUND = 7.1e12, 3.6e12
# 8-bit pages pay only if their codes can be read near the memory's rate, of which such loops reach half.
MIN_ISSUE_BOUND = {torch.bfloat16: 2.3 * VLLM_ISSUE_BOUND, torch.int8: 9.5e12, torch.float8_e4m3fn: 7.5e12}
MIN_BYTES_IN_FLIGHT = 16 << 10  # of an SM: 4.3 TB/s at half a microsecond, by Little's law


def compile_all(target: str, make_cases: Callable[[], Iterable[Case]]) -> dict[str, StaticFigures]:
    """Figures by kernel, after the checks that hold for every kernel."""
    with launches_noted() as launches:
        for case in make_cases():
            case.run()
    figures = {}
    for launch, found in zip(launches, figures_of(compiled(launches, TARGETS[target])), strict=True):
        figures[found.name] = found
        assert found.spill_bytes == 0, f"{found.name} spills {found.spill_bytes} bytes"
        assert found.shared_bytes <= MAX_SHARED_BYTES[target], f"{found.name} wants {found.shared_bytes} bytes of shared memory"
        assert len(launch.kernel.params) <= MAX_PARAMETERS, f"{found.name} has {len(launch.kernel.params)} parameters"
        assert found.programs_per_sm >= 1
        assert found.count_in_loop(r"\b(LDL|STL)\b") == 0, f"{found.name} keeps local memory in its loop"
    return figures


def compile_attention(target: str, shape: AttentionShape) -> tuple[StaticFigures, StaticFigures]:
    """The kernels for short and for long sequences."""
    arch = TARGETS[target].arch
    figures = compile_all(target, lambda: [attention_case(shape, [1, 40], [40, 40], device="cpu", arch=arch, num_sms=1)])
    short, long = figures["_paged_attention_kernel"], figures["_paged_prefill_kernel"]
    if shape.size <= 128 or shape.cache_dtype == torch.bfloat16:  # 8-bit codes of larger heads leave no registers for 64 rows
        assert long.matrix_unit == LONG_UNIT[target]
    assert short.matrix_unit == ("mfma" if target == "gfx942" else "mma")
    if target != "gfx942":
        for kernel in (short, long):
            # Keys and values by asynchronous copies, never element by element; block tables and scales are 4-byte loads.
            assert kernel.count_in_loop("LDGSTS") >= 2
            assert kernel.count_in_loop(r"\bLDG\.[EU\.]*[US](8|16)\b") == 0
            assert kernel.count_in_loop(r"\bLDS\.[EU\.]*[US]8\b") == 0
        # Where the larger units read shared memory themselves, the 16-bit words of 8-bit values are taken out one by one before.
        words = 0 if shape.cache_dtype == torch.bfloat16 else long.loop_instructions // 8
        assert long.count_in_loop(r"\bLDS\.[EU\.]*[US]16\b") <= words
        assert short.count_in_loop(r"\bLDS\.[EU\.]*[US]16\b") == 0
        assert short.count_in_loop(r"LDGSTS.*128") >= 2
    return short, long


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_attention_at_heads_of_128(target, cache_dtype):
    shape = AttentionShape(cache_dtype=cache_dtype)
    short, _ = compile_attention(target, shape)
    if target == "sm_90":
        config = choose_config(shape.size, shape.heads // shape.kv_heads, arch=90, quantised=cache_dtype != torch.bfloat16)
        tile_bytes = 2 * config.tile * shape.size * cache_dtype.itemsize
        bound = short.issue_bound(tile_bytes)
        assert bound > MIN_ISSUE_BOUND[cache_dtype]
        assert bound > 1.2 * (VLLM_ISSUE_BOUND if cache_dtype == torch.bfloat16 else VLLM_8_BIT_ISSUE_BOUND)
        assert short.programs_per_sm >= config.programs_per_sm
        assert short.programs_per_sm * tile_bytes >= MIN_BYTES_IN_FLIGHT


@pytest.mark.parametrize("size", [80, 256])
def test_attention_at_other_heads(size):
    compile_attention("sm_90", AttentionShape(size=size))


@pytest.mark.parametrize(("target", "per_kv"), [("sm_80", 1), ("sm_100", 7)])
def test_attention_where_registers_had_run_out(target, per_kv):
    compile_attention(target, AttentionShape(heads=8 * per_kv))


def test_attention_with_window_and_softcap():
    compile_attention("sm_90", AttentionShape(window=4096, softcap=50.0))


@pytest.mark.parametrize("target", TARGETS)
def test_everything_else(target):
    def cases() -> Iterator[Case]:
        yield from elementwise_cases(2, "cpu")
        yield copy_case(1, "cpu", num_layers=1)
        yield sampling_case(1, "cpu", vocab_size=9000)
        yield quant_matmul_case(1, "cpu", bits=4, group=32, num_inputs=1024)
        yield quant_matmul_case(1, "cpu", bits=8, group=128, num_inputs=1024)
        yield unpack_case("cpu", bits=4, num_outputs=64, num_inputs=256)
        yield unpack_case("cpu", bits=8, num_outputs=64, num_inputs=192)

    assert set(compile_all(target, cases)) == {
        "_rms_norm_kernel", "_swiglu_kernel", "_reshape_and_cache_kernel", "_copy_blocks_kernel",
        "_scores_kernel", "_draw_kernel", "_quant_matmul_kernel", "_unpack_kernel",
    }  # fmt: skip


def test_the_search_for_a_threshold_walks_through_the_vocabulary_without_a_barrier():
    """It does so some sixteen times a row; sums over the threads in every block made each walk twice as long."""
    with launches_noted() as launches:
        sampling_case(1, "cpu", top_k=5, top_p=0.5).run()
    (kernel,) = compiled([launch for launch in launches if launch.kernel.fn.__name__ == "_draw_kernel"], TARGETS["sm_90"])
    (listing,) = disassembled([machine_code(kernel.asm["cubin"])], 90)
    walks = [loop for loop in innermost_loops(listing) if any("MUFU.EX2" in instruction for instruction in loop)]
    assert len(walks) >= 4
    assert not any("BAR" in instruction for loop in walks for instruction in loop)


@pytest.mark.parametrize(("bits", "group", "bound"), [(4, 32, 4.5e12), (4, 128, 7.4e12), (8, 32, 7e12), (8, 128, 10.5e12)])
def test_quantised_linears_are_not_bound_by_instructions(bits, group, bound):
    """The H200 reads 4.8e12 bytes a second."""
    figures = compile_all("sm_90", lambda: [quant_matmul_case(1, "cpu", bits=bits, group=group)])["_quant_matmul_kernel"]
    loop_bytes = COLS * max(PIECE_BYTES, group * bits / 8)
    assert figures.matrix_unit == "mma"
    assert figures.count_in_loop("LDGSTS.*128") >= loop_bytes / (16 * 32 * figures.num_warps)  # codes come by 16-byte copies
    assert figures.issue_bound(loop_bytes) > bound
    assert figures.programs_per_sm * loop_bytes >= MIN_BYTES_IN_FLIGHT


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_unpacked_in_one_pass_of_wide_copies(bits):
    """Of words read and floats written, 16 bytes each; what is stored is already in the model's own type."""
    with launches_noted() as launches:
        unpack_case("cpu", bits=bits, num_outputs=64, num_inputs=256).run()
    (listing,) = disassembled([machine_code(kernel.asm["cubin"]) for kernel in compiled(launches, TARGETS["sm_90"])], 90)
    code = [instruction for _, instruction in listing]
    assert sum("LDG" in text and ".128" in text for text in code) >= 1
    stores = [text for text in code if "STG" in text]
    assert stores
    assert all(".128" in text for text in stores)
    assert len(code) < 1000


LINEAR_FORMATS = [
    (dtype, bits, group) for dtype in (torch.bfloat16, torch.float16) for bits in (4, 8) for group in (32, 64, 128)
] + [(torch.float32, 4, 32), (torch.float32, 8, 32)]  # what GGUF files have


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "bits", "group"), LINEAR_FORMATS)
def test_quantised_linear_matrix(target, dtype, bits, group):
    for num_inputs in (1024, 1024 + max(64, group)):  # whole pieces, and, but for groups of 128, an odd number of halves
        compile_all(target, lambda n=num_inputs: [quant_matmul_case(1, "cpu", bits=bits, group=group, num_inputs=n, dtype=dtype)])


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("per_kv", [1, 4, 7, 16])
def test_attention_matrix(target, size, cache_dtype, per_kv):
    """The whole product: half of it, all pairs and every triple with 7, missed a kernel that spills for one head per KV head alone."""
    compile_attention(target, AttentionShape(heads=8 * per_kv, size=size, cache_dtype=cache_dtype))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [32, 64, 256])
def test_attention_block_sizes(block_size):
    compile_attention("sm_90", AttentionShape(block_size=block_size))
