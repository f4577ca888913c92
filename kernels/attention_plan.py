"""The work list of a step's attention, written on the device, so that one launch shape serves every mix of lengths.

A sequence with at most `short_query` tokens in the step goes to kernels.paged_attention, which splits its context; a longer one
to kernels.paged_prefill.  Which of the two depends on that sequence alone.

Splits have a fixed length in tokens at fixed positions, and their results are merged in a fixed tree: `leaf` tokens make a leaf,
`group` leaves a group, the groups the answer.  Whether a leaf is a program's whole work, or one program walks through all of
them because the buffer of partial results is full, changes nothing about the sums: no row depends on what else is in the step.

Items (int32 x 4):  short: sequence, query block, leaf or -1 for all of them, first buffer slot of the sequence or -1
                    long:  sequence, query block, 0, 0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 128
PARTIAL_EXTRA = 4  # of the D + 4 floats of a partial result, the maximum and the sum take two; the rest keeps rows aligned


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes that decide speed, and bits: two runs agree bit by bit only under the same config."""

    short_query: int = 16  # tokens in a step up to which a sequence is short
    leaf: int = 512  # tokens
    group: int = 16  # leaves
    tile: int = 64  # keys at a time
    rows: int = 16  # query tokens x heads per KV head
    num_warps: int = 4
    num_stages: int = 3
    # A thread's.  None leaves it to the compiler, of which one version takes 250 where another spills to fit in 168.
    max_registers: int | None = None
    programs_per_sm: int = 3
    long_tile: int = 64
    long_rows: int = 128
    long_num_warps: int = 8
    long_num_stages: int = 3
    long_max_registers: int | None = None
    long_programs_per_sm: int = 1

    def short_options(self) -> dict[str, int]:
        """Launch options of the kernel for short sequences."""
        return _options(self.num_warps, self.num_stages, self.max_registers)

    def long_options(self) -> dict[str, int]:
        return _options(self.long_num_warps, self.long_num_stages, self.long_max_registers)


def _options(num_warps: int, num_stages: int, max_registers: int | None) -> dict[str, int]:
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return options if max_registers is None else options | {"maxnreg": max_registers}


def choose_config(
    head_size: int, heads_per_kv: int, *, arch: int | str = 90, quantised: bool = False, exact: bool = False
) -> AttentionConfig:
    """The config for a model and GPU, from the table that static analysis gave (kernels/README.md, tuning record).

    arch: 80, 90, 100, … on NVIDIA, "gfx942" or the like on AMD.
    exact: give a row the same bits in a long prompt chunk as in a decode step, by sending every sequence to the same kernel.
    """
    rows = max(16, triton.next_power_of_2(heads_per_kv))
    tile, num_stages = _short_sizes(head_size, arch, quantised)
    long_tile, long_rows, long_warps = _long_sizes(head_size, arch, quantised)
    if arch == 80:
        long_tile, long_rows, long_warps = _sm_80_exceptions(head_size, heads_per_kv, quantised, (long_tile, long_rows, long_warps))
    return AttentionConfig(
        short_query=1 << 30 if exact else 16, tile=tile, rows=rows, num_stages=num_stages,
        max_registers=_max_registers(head_size, heads_per_kv, arch, quantised),
        programs_per_sm=2,
        long_tile=long_tile, long_rows=max(rows, long_rows), long_num_warps=long_warps,
        long_max_registers=_long_max_registers(head_size, arch, quantised, long_warps),
        long_programs_per_sm=2 if long_warps == 4 else 1,
    )  # fmt: skip


def _max_registers(head_size: int, heads_per_kv: int, arch: int | str, quantised: bool) -> int | None:
    """As many as leave room for two programs on an SM; 240 where that is enough, for one version's assembler spills beyond."""
    if isinstance(arch, str):
        return None
    divides_rows = heads_per_kv & (heads_per_kv - 1) != 0
    return 255 if head_size > 128 or (arch >= 90 and quantised) or (arch >= 100 and divides_rows) else 240


def _short_sizes(head_size: int, arch: int | str, quantised: bool) -> tuple[int, int]:
    """Tile and pipeline stages: the largest tile of the head size's part without a spilled register."""
    is_old = isinstance(arch, int) and arch < 90
    if quantised:
        return 32 if isinstance(arch, str) else 64 if head_size > 128 else 128, 3
    if head_size > 128:
        return 32, 3
    if head_size <= 64:
        return 64 if is_old else 128, 3
    return 32 if is_old and head_size == 80 else 64, 3


def _long_sizes(head_size: int, arch: int | str, quantised: bool) -> tuple[int, int, int]:
    """Tile, rows and warps; fewer than 64 rows are below what the larger matrix units take."""
    is_amd, is_old = isinstance(arch, str), isinstance(arch, int) and arch < 90
    if quantised:
        if is_amd or (head_size > 128 and not is_old):
            return 32, 32, 4
        return 16 if head_size > 128 else 32, 64, 4 if is_old and 64 < head_size <= 128 else 8
    if head_size > 128:
        return 16 if is_old and head_size == 192 else 32, 64, 4 if is_amd else 8
    if is_amd:
        return 64, 64, 4
    if is_old:
        return 32 if head_size in (112, 128) else 64, 64, 4
    return 64, 128, 8


def _sm_80_exceptions(
    head_size: int, heads_per_kv: int, quantised: bool, sizes: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Where the usual sizes spill: row numbers are divided by the heads per KV head, which takes registers unless it is 2, 4, 8, …"""
    if heads_per_kv in (1, 16) and head_size in (80, 96) and not quantised:
        return 32, 64, 4
    if heads_per_kv & (heads_per_kv - 1) == 0:
        return sizes
    if quantised:
        few = (32, 32, 4)
        return {80: (16, 64, 8), 96: (16, 64, 8), 112: (16, 64, 8), 128: (16, 64, 8), 192: few, 256: few}.get(head_size, sizes)
    return {64: (64, 64, 8), 80: (32, 64, 4), 96: (16, 64, 8), 112: (16, 64, 4), 128: (32, 64, 8)}.get(head_size, sizes)


def _long_max_registers(head_size: int, arch: int | str, quantised: bool, num_warps: int) -> int | None:
    """Where some version's assembler would rather spill than take the registers that are there."""
    if isinstance(arch, str):
        return None
    if quantised:
        return 255 if head_size > 128 else 240 if arch >= 100 and num_warps == 8 else None
    return 255 if arch == 80 and head_size in (64, 128) and num_warps == 4 else None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The lists of one step and window; the kernels read the lengths from the tensors they were made from."""

    seq_lens: Tensor  # [S] int32
    query_start: Tensor  # [S + 1] int32
    short_items: Tensor  # [N, 4] int32
    long_items: Tensor
    counts: Tensor  # [2] int32: short items, long items
    window: int  # 0: none
    has_long: bool  # false lets the host skip a launch; true is always right


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """What launches on one stream share: partial results, and counters that every launch leaves at zero.

    A slot holds the partial result of one leaf of one query token.  A sequence that needs more slots than are left is not split;
    the program that then walks through all of it keeps the partial results in rows of its own, which come first.
    """

    partials: Tensor  # [num_programs * own_slots * rows + num_slots * H, D + 4] float32
    arrivals: Tensor  # [num_slots, G, 2] int32: of leaves at their group, of groups at the query block
    tickets: Tensor  # [2] int32: of the kernel for short sequences, of the one for long sequences
    num_programs: int  # of the kernel for short sequences: about as many as the GPU holds at once; more find no work
    num_long_programs: int
    num_slots: int
    own_slots: int  # of each program: the leaves of a group, and all groups of the longest sequence
    max_seq_len: int


def make_workspace(
    num_heads: int, num_kv_heads: int, head_size: int, config: AttentionConfig, device: torch.device | str, *,
    max_seq_len: int, num_sms: int, num_slots: int | None = None,
) -> AttentionWorkspace:  # fmt: skip
    """max_seq_len: no sequence may become longer; num_slots: by default 32 MiB of them."""
    num_programs = num_sms * config.programs_per_sm
    width = head_size + PARTIAL_EXTRA
    if num_slots is None:
        num_slots = (32 << 20) // (num_heads * width * 4)
    own_slots = config.group + triton.cdiv(max_seq_len, config.leaf * config.group)
    rows = num_programs * own_slots * config.rows + num_slots * num_heads
    assert rows * width < 2**31, "rows of partial results are addressed in 32 bits"
    return AttentionWorkspace(
        partials=torch.empty(rows, width, dtype=torch.float32, device=device),
        arrivals=torch.zeros(num_slots, num_kv_heads, 2, dtype=torch.int32, device=device),
        tickets=torch.zeros(2, dtype=torch.int32, device=device),
        num_programs=num_programs, num_long_programs=num_sms * config.long_programs_per_sm,
        num_slots=num_slots, own_slots=own_slots, max_seq_len=max_seq_len,
    )  # fmt: skip


@triton.jit
def leaf_range(seq_len, query_len, LEAF: tl.constexpr, WINDOW: tl.constexpr):
    """The leaves that some query of the sequence may see; the plan and the kernel must agree on it."""
    low = seq_len * 0
    if WINDOW > 0:
        low = tl.maximum(seq_len - query_len - WINDOW + 1, 0) // LEAF
    return low, tl.cdiv(seq_len, LEAF)


@triton.jit(do_not_specialize=["num_seqs"])
def _plan_kernel(
    seq_lens_ptr, query_start_ptr, short_ptr, long_ptr, counts_ptr, num_seqs,
    SHORT_QUERY: tl.constexpr, SHORT_BLOCK: tl.constexpr, LONG_BLOCK: tl.constexpr, LEAF: tl.constexpr, WINDOW: tl.constexpr,
    SLOTS: tl.constexpr, MAX_SEQS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # Every program looks at all sequences to find where its own items start: cheaper than a second launch.
    mine = tl.program_id(0)
    s = tl.arange(0, MAX_SEQS)
    inside = s < num_seqs
    query_len = tl.load(query_start_ptr + s + 1, mask=inside, other=0) - tl.load(query_start_ptr + s, mask=inside, other=0)
    seq_len = tl.load(seq_lens_ptr + s, mask=inside, other=0)
    low, high = leaf_range(seq_len, query_len, LEAF, WINDOW)
    leaves = high - low
    short = (query_len > 0) & (query_len <= SHORT_QUERY)
    blocks = (query_len + SHORT_BLOCK - 1) // SHORT_BLOCK
    need = tl.where(short & (leaves > 1), leaves * query_len, 0)
    need_end = tl.cumsum(need, axis=0)
    split = (need > 0) & (need_end <= SLOTS)
    whole_items = tl.where(short & (split == 0), blocks, 0)
    split_items = tl.where(split, blocks * leaves, 0)
    whole_end = tl.cumsum(whole_items, axis=0)
    split_end = tl.cumsum(split_items, axis=0)
    num_whole = tl.sum(whole_items, axis=0)
    long_items = tl.where(query_len > SHORT_QUERY, (query_len + LONG_BLOCK - 1) // LONG_BLOCK, 0)
    long_end = tl.cumsum(long_items, axis=0)
    if mine == 0:
        tl.store(counts_ptr, num_whole + tl.sum(split_items, axis=0))
        tl.store(counts_ptr + 1, tl.sum(long_items, axis=0))

    me = s == mine
    is_split = tl.sum(tl.where(me & split, 1, 0), axis=0) > 0
    my_blocks = tl.sum(tl.where(me, blocks, 0), axis=0)
    my_slot = tl.sum(tl.where(me, need_end - need, 0), axis=0)
    # Sequences that are not split come first: only they can be long items.
    first = tl.sum(tl.where(me, tl.where(split, num_whole + split_end - split_items, whole_end - whole_items), 0), axis=0)
    num_items = tl.sum(tl.where(me, whole_items + split_items, 0), axis=0)
    for start in range(0, num_items, CHUNK):
        item = start + tl.arange(0, CHUNK)
        # Query blocks of one leaf lie side by side: the second finds its keys in the cache.
        leaf = tl.where(is_split, item // tl.maximum(my_blocks, 1), -1)
        slot = tl.where(is_split, my_slot, -1)
        target = short_ptr + (first + item) * 4
        write = item < num_items
        tl.store(target, mine + item * 0, mask=write)
        tl.store(target + 1, item % tl.maximum(my_blocks, 1), mask=write)
        tl.store(target + 2, leaf + item * 0, mask=write)
        tl.store(target + 3, slot + item * 0, mask=write)
    long_first = tl.sum(tl.where(me, long_end - long_items, 0), axis=0)
    num_long = tl.sum(tl.where(me, long_items, 0), axis=0)
    for start in range(0, num_long, CHUNK):
        item = start + tl.arange(0, CHUNK)
        target = long_ptr + (long_first + item) * 4
        tl.store(target, mine + item * 0, mask=item < num_long)
        # The last block of a prompt sees the most keys: the heaviest work first.
        tl.store(target + 1, num_long - 1 - item, mask=item < num_long)


def make_plan(
    seq_lens: Tensor, query_start: Tensor, config: AttentionConfig, workspace: AttentionWorkspace, *,
    heads_per_kv: int, num_tokens: int, max_query_len: int, window: int | None = None,
) -> AttentionPlan:  # fmt: skip
    """Write the work lists of a step.

    Shapes:  seq_lens [S] int32; query_start [S + 1] int32; a padding sequence has no query tokens, its length does not matter.
             num_tokens and max_query_len are upper bounds, for the size of the lists and for skipping a launch.
    """
    num_seqs = seq_lens.shape[0]
    short_block, long_block = config.rows // heads_per_kv, config.long_rows // heads_per_kv
    num_short = workspace.num_slots + num_tokens // short_block + num_seqs
    items = torch.empty(num_short + num_tokens // long_block + num_seqs, 4, dtype=torch.int32, device=seq_lens.device)
    counts = torch.empty(2, dtype=torch.int32, device=seq_lens.device)
    _plan_kernel[(num_seqs,)](
        seq_lens, query_start, items, items[num_short:], counts, num_seqs,
        SHORT_QUERY=config.short_query, SHORT_BLOCK=short_block, LONG_BLOCK=long_block, LEAF=config.leaf, WINDOW=window or 0,
        SLOTS=workspace.num_slots, MAX_SEQS=max(256, triton.next_power_of_2(num_seqs)), CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return AttentionPlan(
        seq_lens, query_start, items[:num_short], items[num_short:], counts, window or 0, max_query_len > config.short_query
    )
