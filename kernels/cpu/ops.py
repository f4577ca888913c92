"""Launchers of the CPU operators: they check, and hand pointers to the compiled library.

Every operator works in float32 and keeps one promise: **each output row depends on its own inputs alone**, bit for bit,
whatever the other rows of the call, their number, and the number of threads.

Shape letters: T tokens, S sequences, H query heads, G KV heads, D head size, B blocks, K block size, V vocabulary.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagestream.kernels.cpu.build import BuildFailed, load
from pagestream.kernels.cpu.library import CAttentionCall, CBatch, CDecoderConfig, CDecoderLayer, CPages, CSpec, declare
from pagestream.kernels.kv_format import head_size_of, is_quantised

logger = logging.getLogger(__name__)

FORMATS = {torch.float32: 0, torch.bfloat16: 1}
PAGE_FORMATS = FORMATS | {torch.int8: 8, torch.float8_e4m3fn: 9}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
MAX_HEAD_SIZE = 256
GRANULE = 16  # tokens that lie together in a page


@dataclass(frozen=True, slots=True)
class GgufKind:
    number: int  # GGUF's own
    block_bytes: int


GGUF_KINDS = {"Q4_0": GgufKind(2, 18), "Q4_1": GgufKind(3, 20), "Q8_0": GgufKind(8, 34)}


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The ragged batch of a step, as the attention of the engine describes it; wrong numbers are refused, not followed."""

    positions: Tensor  # [T] int64, ascending within a sequence
    slot_mapping: Tensor  # [T] int64; negative: not written
    query_start: Tensor  # [S + 1] int32
    seq_lens: Tensor  # [S] int32
    block_tables: Tensor  # [S, max_blocks] int32

    def pointers(self) -> tuple[CBatch, list[Tensor]]:
        """The C form, and the tensors that must outlive it."""
        kept = [
            _plain(self.positions, torch.int64),
            _plain(self.slot_mapping, torch.int64),
            _plain(self.query_start, torch.int32),
            _plain(self.seq_lens, torch.int32),
            _plain(self.block_tables, torch.int32),
        ]
        num_tokens, num_seqs = self.positions.numel(), self.seq_lens.numel()
        if self.slot_mapping.numel() != num_tokens or self.query_start.numel() != num_seqs + 1 or len(self.block_tables) != num_seqs:
            raise ValueError("the tensors of the batch disagree about the number of tokens or sequences")
        return CBatch(num_tokens, num_seqs, self.block_tables.shape[1], *(t.data_ptr() for t in kept)), kept


@dataclass(frozen=True, slots=True)
class GgufBlocks:
    """A weight [n, k] as a GGUF file holds it: rows of blocks of 32 along k.  Rows can be chosen and stacked as they are."""

    kind: str  # Q4_0 | Q4_1 | Q8_0
    data: Tensor  # [n, bytes of a row] uint8

    def __post_init__(self) -> None:
        if self.kind not in GGUF_KINDS:
            raise ValueError(f"no operator for {self.kind} weights; there is one for {', '.join(GGUF_KINDS)}")
        if self.data.dtype != torch.uint8 or self.data.dim() != 2 or self.data.shape[1] % GGUF_KINDS[self.kind].block_bytes:
            raise ValueError(f"{tuple(self.data.shape)} {self.data.dtype} are not rows of {self.kind} blocks")

    @property
    def n(self) -> int:
        return self.data.shape[0]

    @property
    def k(self) -> int:
        return self.data.shape[1] // GGUF_KINDS[self.kind].block_bytes * 32


QUANTISED_KINDS = ("Q4_1", "Q8_0")
NOT_HELD = "some of them are not finite, or too large for a 16-bit scale"


def empty_blocks(weight: Tensor, kind: str) -> GgufBlocks:
    """Room for a weight [n, k]; raises ValueError where it can't become blocks of this kind."""
    if kind not in QUANTISED_KINDS or weight.dim() != 2 or weight.shape[1] % 32 or not weight.is_floating_point():
        raise ValueError(f"{weight.dtype} weights of {tuple(weight.shape)} do not become {kind} blocks")
    n, k = weight.shape
    width = k // 32 * GGUF_KINDS[kind].block_bytes
    return GgufBlocks(kind, torch.empty(n, width, dtype=torch.uint8, device=weight.device))


class PackedLinear:
    """A weight in the layout that the operators read; immutable, and owner of its memory.

    `paired` weights have their outputs j and j + n / 2 side by side, as DecoderOp wants gate and up; they cannot be called.
    """

    def __init__(self, ops: CpuOps, handle: int, n: int, k: int, paired: bool) -> None:
        self.ops, self.handle, self.n, self.k, self.paired = ops, handle, n, k, paired
        self.num_bytes: int = ops.library.ps_linear_bytes(handle)
        _free_with(self, ops.library.ps_linear_free, handle)

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes:  x [rows, k] float32; returns [rows, n] float32.
        Numbers: float32 sums; with weights of 16 bits or fewer, x is rounded to bfloat16 first.
        """
        x = self._checked(x)
        out = torch.empty(len(x), self.n)
        self.ops.library.ps_linear_run(self.ops.pool, self.handle, x.data_ptr(), len(x), out.data_ptr())
        return out

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's greatest output without the others: where it stands, the first of equals, and what it is.

        Shapes:  x [rows, k] float32; returns [rows] int64 and [rows] float32.
        Numbers: those of the call above, bit for bit; NaN if one of the row's outputs is.
        """
        x = self._checked(x)
        places, values = torch.empty(len(x), dtype=torch.int64), torch.empty(len(x))
        self.ops.library.ps_linear_best(self.ops.pool, self.handle, x.data_ptr(), len(x), places.data_ptr(), values.data_ptr())
        return places, values

    def _checked(self, x: Tensor) -> Tensor:
        if self.paired or x.dim() != 2 or x.shape[1] != self.k:
            raise ValueError(f"a weight of {self.n} x {self.k}{' pairs' if self.paired else ''} cannot take {tuple(x.shape)}")
        return _plain(x, torch.float32)


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """What DecoderOp must know of a model beside its weights."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rotary_dim: int
    rms_norm_eps: float
    attention_scale: float
    attention_factor: float
    activation: str  # silu | gelu_tanh


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear  # paired
    down: PackedLinear
    input_norm: Tensor  # [hidden]
    post_norm: Tensor  # [hidden]
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None
    window: int | None


class DecoderOp:
    """Embedding, all layers and the final norm of a Llama-shaped decoder, in one call of the library."""

    def __init__(
        self,
        ops: CpuOps,
        sizes: DecoderSizes,
        layers: Sequence[DecoderLayer],
        inv_freq: Tensor,
        final_norm: Tensor,
        head: PackedLinear,
        embedding: Tensor | None,
    ) -> None:
        """`embedding` [V, hidden] float32 or bfloat16; None: it is looked up in the head."""
        self.ops, self.sizes, self.head = ops, sizes, head
        if sizes.attention_scale <= 0:
            raise ValueError(f"the attention scale must be positive, not {sizes.attention_scale}")
        self._kept: list[object] = [layers]  # what the library points into
        norms = [self._float32(norm) for layer in layers for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)]
        c_layers = (CDecoderLayer * len(layers))(
            *(
                CDecoderLayer(
                    *(w.handle for w in (layer.qkv, layer.o, layer.gate_up, layer.down)), *norms[4 * i : 4 * i + 4], layer.window or 0
                )
                for i, layer in enumerate(layers)
            )
        )
        if embedding is not None:
            embedding = embedding.contiguous()
            self._kept.append(embedding)
        config = CDecoderConfig(
            *(sizes.hidden_size, sizes.intermediate_size, len(layers), sizes.num_heads, sizes.num_kv_heads, sizes.head_size),
            *(sizes.vocab_size, sizes.rotary_dim, ACTIVATIONS[sizes.activation]),
            FORMATS[embedding.dtype] if embedding is not None else 0,
            *(sizes.rms_norm_eps, sizes.attention_scale, sizes.attention_factor),
            *(self._float32(inv_freq), self._float32(final_norm)),
            embedding.data_ptr() if embedding is not None else None,
            head.handle,
        )
        self.handle: int = ops.library.ps_decoder_create(ctypes.byref(config), c_layers)
        self.num_layers = len(layers)
        _free_with(self, ops.library.ps_decoder_free, self.handle)

    def pages(self, k_pages: Sequence[Tensor], v_pages: Sequence[Tensor]) -> ctypes.Array[CPages]:
        """The cache as a call takes it: pages of every layer, as supports_pages has them, which must outlive it."""
        if len(k_pages) != self.num_layers or len(v_pages) != self.num_layers:
            raise ValueError("pages of every layer are needed")
        return (CPages * self.num_layers)(*(_pages(k, v, self.sizes.num_kv_heads) for k, v in zip(k_pages, v_pages, strict=True)))

    def __call__(self, token_ids: Tensor, pages: ctypes.Array[CPages], batch: PagedBatch) -> Tensor:
        """Compute the batch's tokens and write their K and V.

        Shapes:  token_ids [T] int64; returns [T, hidden] float32.
        Raises:  ValueError if the batch names a token, slot or block that does not exist; nothing has changed then.
        """
        token_ids = _plain(token_ids, torch.int64)
        if token_ids.numel() != batch.positions.numel():
            raise ValueError("a position for every token is needed")
        c_batch, kept = batch.pointers()
        out = torch.empty(token_ids.numel(), self.sizes.hidden_size)
        failed = self.ops.library.ps_decoder_forward(
            self.ops.pool, self.handle, token_ids.data_ptr(), ctypes.byref(c_batch), pages, out.data_ptr()
        )
        if failed:
            raise ValueError("the batch names a token, a slot or a block that does not exist")
        del kept
        return out

    def _float32(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.to(torch.float32).contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


class CpuOps:
    """The compiled operators and their threads.  Calls from several threads wait for each other."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library = library
        declare(library)
        self.pool: int = library.ps_pool_create(threads)
        self.threads: int = library.ps_pool_size(self.pool)
        if self.threads < threads:
            logger.warning("the system starts no more than %d of %d threads for the CPU operators", self.threads, threads)
        self.instructions: str = library.ps_describe().decode()
        _free_with(self, library.ps_pool_free, self.pool)

    def linear(self, weight: Tensor, bias: Tensor | None = None, *, paired: bool = False) -> PackedLinear:
        """Pack a weight [n, k], float32 or bfloat16, which is not needed afterwards."""
        if weight.dtype not in FORMATS or weight.dim() != 2:
            raise ValueError(f"a weight is a float32 or bfloat16 matrix, not {weight.dtype} with {weight.dim()} dimensions")
        n, k = weight.shape
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        if n % 2 and paired:
            raise ValueError(f"{n} outputs do not make pairs")
        bias = _checked_bias(bias, n, paired)
        handle = self.library.ps_linear_create(
            self.pool, FORMATS[weight.dtype], n, k, paired, weight.data_ptr(), weight.stride(0), _address(bias)
        )
        return PackedLinear(self, handle, n, k, paired)

    def quantised_linear(self, blocks: GgufBlocks, bias: Tensor | None = None, *, paired: bool = False) -> PackedLinear:
        """Pack a GGUF weight.  Its products are those of the dequantised weight in bfloat16, bit for bit."""
        bias, data = _checked_bias(bias, blocks.n, paired), blocks.data.contiguous()
        handle = self.library.ps_linear_create_quantised(
            self.pool, GGUF_KINDS[blocks.kind].number, blocks.n, blocks.k, paired, data.data_ptr(), _address(bias)
        )
        return PackedLinear(self, handle, blocks.n, blocks.k, paired)

    def quantise(self, weight: Tensor, kind: str) -> GgufBlocks:
        """The blocks nearest to a weight [n, k] of any float type: bit for bit those of kernels.block_quantise.

        Raises ValueError for a kind or a number of columns that has no blocks, and for weights that no block holds.
        """
        blocks = empty_blocks(weight, kind)
        data = _plain(weight, weight.dtype if weight.dtype in FORMATS else torch.float32)
        failed = self.library.ps_quantise(
            self.pool, GGUF_KINDS[kind].number, FORMATS[data.dtype], blocks.n, blocks.k, data.data_ptr(), blocks.data.data_ptr()
        )
        if failed:
            raise ValueError(NOT_HELD)
        return blocks

    def paged_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write K and V of the batch's tokens into their slots, then attend every query to its own sequence up to itself.

        Shapes:  q [T, H, D]; k, v [T, G, D]; pages [B, G, K, D], of 8 bits [B, G, K, D + 4], K a multiple of 16; sinks [H];
                 returns [T, H, D] float32.
        Numbers: q is rounded to the type of the pages, and so are the softmax's weights; scores and sums in float32.  With
                 pages of 8 bits, both are rounded to bfloat16, and the codes are multiplied as they are.
        Raises:  ValueError if the batch names a slot or block that does not exist; nothing has changed then.
        Source:  Kwon et al. 2023, PagedAttention; Milakov & Gimelshein 2018, online softmax.
        """
        if scale <= 0:
            raise ValueError(f"the scale must be positive, not {scale}")
        num_tokens, num_heads, head_size = q.shape
        if k.shape != v.shape or k.shape[0] != num_tokens or k.shape[2] != head_size or num_heads % k.shape[1]:
            raise ValueError(f"queries {tuple(q.shape)} do not go with keys {tuple(k.shape)} and values {tuple(v.shape)}")
        pages = _pages(k_pages, v_pages, k.shape[1])
        if pages.head_size != head_size or batch.positions.numel() != num_tokens:
            raise ValueError(f"queries {tuple(q.shape)} do not go with pages {tuple(k_pages.shape)} or the batch")
        q, k, v = (_plain(t, torch.float32) for t in (q, k, v))
        if sinks is not None:
            sinks = _plain(sinks, torch.float32)
        c_batch, kept = batch.pointers()
        out = torch.empty(num_tokens, num_heads, head_size)
        call = CAttentionCall(
            *(t.data_ptr() for t in (q, k, v, out)),
            num_heads,
            pages,
            CSpec(scale, window or 0, softcap or 0.0, _address(sinks)),
            c_batch,
        )
        if self.library.ps_attention_run(self.pool, ctypes.byref(call)):
            raise ValueError("the batch names a slot or a block that does not exist")
        del kept
        return out


def load_ops(threads: int | None = None, march: str = "native", defines: tuple[str, ...] = ()) -> CpuOps | None:
    """The operators, compiled at the first use; None where there is no compiler, which the log then says.

    `threads` None: one per core that this process may use.  `march` and `defines`: see build().
    """
    try:
        library = load(march, defines)
    except (BuildFailed, OSError) as error:
        logger.warning("the CPU operators are not available, plain torch serves instead: %s", " ".join(str(error).split()))
        return None
    return CpuOps(library, threads or usable_cores())


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def supports_pages(dtype: torch.dtype, head_size: int, block_size: int) -> bool:
    """Whether paged attention here can work on such pages."""
    per_word = 4 if is_quantised(dtype) else 2
    return dtype in PAGE_FORMATS and head_size % per_word == 0 and head_size <= MAX_HEAD_SIZE and block_size % GRANULE == 0


def _pages(k: Tensor, v: Tensor, num_kv_heads: int) -> CPages:
    num_blocks, num_heads, block_size, _ = k.shape
    head_size = head_size_of(k)
    if k.shape != v.shape or k.dtype != v.dtype or not k.is_contiguous() or not v.is_contiguous() or num_heads != num_kv_heads:
        raise ValueError(f"pages are contiguous pairs [B, G, K, D], not {tuple(k.shape)} and {tuple(v.shape)}")
    if not supports_pages(k.dtype, head_size, block_size):
        raise ValueError(f"no attention over {k.dtype} pages of {block_size} tokens with heads of {head_size}")
    return CPages(k.data_ptr(), v.data_ptr(), num_blocks, num_heads, block_size, head_size, PAGE_FORMATS[k.dtype])


def _free_with(owner: object, free: Callable[[int], None], handle: int) -> None:
    """Not at the interpreter's exit: a thread may still be in a call, and the system takes everything back anyway."""
    weakref.finalize(owner, free, handle).atexit = False


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype is dtype and tensor.is_contiguous() else tensor.to(dtype=dtype).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _checked_bias(bias: Tensor | None, n: int, paired: bool) -> Tensor | None:
    if bias is None:
        return None
    if bias.shape != (n,) or paired:
        raise ValueError(f"a bias of {tuple(bias.shape)} does not go with {n} outputs{' in pairs' if paired else ''}")
    return _plain(bias, torch.float32)
