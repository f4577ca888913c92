"""Whole decode steps as CUDA graphs: forward pass, logits and draw, launched by one call of the host.

One graph for each of some batch sizes; a step is padded to the next of them by sequences that have no query tokens and tokens
that have no slot.  Everything that differs between steps lies in one buffer per graph, which one copy fills before the replay; in
the captured region no number is Python's.  Whatever a row wants beyond one draw from its own logits (penalties, masks, logprobs)
is launched afterwards, on the logits that the graph leaves: masks and lists take the host a while, which it has during the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import ScheduledSequence, StepPlan
from pagestream.engine.models.base import CausalLM
from pagestream.engine.runner.batch import TableRows
from pagestream.engine.runner.kv_cache import KVCache
from pagestream.engine.sampling.choosing import Choice, ScoredRow
from pagestream.engine.sampling.kernel_chooser import KernelChooser, draws_of, table_arrays
from pagestream.kernels.sampling import Sampled, sample
from pagestream.kernels.transfer import Array, HostLink, num_bytes, views

PROGRESS_AFTER_S = 1.0  # a bar for what is done sooner would only flicker

T = TypeVar("T")


class GraphMaker(Protocol):
    """Captures work, so that it can be repeated on what its tensors then hold.  Tests put a fake in CudaGraphMaker's place."""

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """A call that repeats the work, and its results, which every repetition writes anew."""


class CudaGraphMaker:
    """All graphs share one pool of memory: only one runs at a time, and none needs what another left there."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's handle of it

    def capture(self, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do on the device meanwhile is none of this capture's business.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = work()
        self._pool = graph.pool()
        return graph.replay, results


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One batch size."""

    num_rows: int
    inputs: Tensor  # bytes: the arrays of `_step_arrays` and of the draws, one after another
    replay: Callable[[], None]
    logits: Tensor  # [num_rows, V] float32: the first rows of a place that all graphs share
    sampled: Sampled


@dataclass(frozen=True, slots=True)
class Replayed:
    logits: Tensor  # [R, V] float32, the caller's to change until the next step
    choice: Callable[[Sequence[ScoredRow]], Choice]  # of draws from these logits, with logprobs of some rows; waits for the device


def batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, and from 8 on every multiple of 8, of 16 beyond 256; the largest is max_num_seqs itself."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 1, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Invariant: a replayed step gives the bits that the same step gives when run eagerly with the same padding."""

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        chooser: KernelChooser,
        link: HostLink,
        *,
        block_size: int,
        max_num_seqs: int,
        max_context_len: int,
        device: torch.device,
        maker: GraphMaker | None = None,
    ):
        """max_context_len: steps with a longer sequence are not for graphs."""
        self._model = model
        self._cache = cache
        self._chooser = chooser
        self._link = link
        self._block_size = block_size
        self._sizes = batch_sizes(max_num_seqs)
        self._max_blocks = -(-max_context_len // block_size)
        self._max_context_len = self._max_blocks * block_size
        self._table_rows = TableRows()
        self._device = device
        self._maker = maker or CudaGraphMaker()
        self._graphs: dict[int, DecodeGraph] = {}
        # Of the step that was replayed last.  What a graph leaves in a place of its own is kept as long as the graph is, and tens of
        # them would keep gigabytes.
        self._logits = torch.empty(max_num_seqs, model.shape.vocab_size, dtype=torch.float32, device=device)

    def capture(self) -> None:
        """All batch sizes, the largest first, so that the others find their memory in its pool.  Before the first request."""
        from tqdm import tqdm

        sizes = tqdm(sorted(self._sizes, reverse=True), desc="graphs", unit="size", delay=PROGRESS_AFTER_S, disable=None, leave=False)
        for num_rows in sizes:
            self._graphs[num_rows] = self._capture(num_rows)

    def serves(self, plan: StepPlan) -> bool:
        """Whether every row is one token with one sample, and none too long; nothing is served before the capture."""
        rows = plan.scheduled
        return len(rows) <= max(self._graphs, default=0) and all(
            len(row.token_ids) == 1
            and len(row.samples) == 1
            and not row.scored_token_ids
            and not row.num_pooled
            and row.start < self._max_context_len
            for row in rows
        )

    def run(self, rows: Sequence[ScheduledSequence], params: Sequence[SamplingParams]) -> Replayed:
        """Replay the step of these rows, for which `serves` was true; params is of each row."""
        graph = self._graphs[next(size for size in self._sizes if size >= len(rows))]
        draws = draws_of(rows, params)
        arrays = [*self._step_arrays(rows, graph.num_rows), *(padded(part, graph.num_rows) for part in table_arrays(draws))]
        self._link.refill(graph.inputs, arrays)
        graph.replay()
        logits = graph.logits[: len(rows)]
        return Replayed(logits, lambda scored: self._chooser.read(logits, graph.sampled, draws, rows, scored))

    def _step_arrays(self, rows: Sequence[ScheduledSequence], num_rows: int) -> list[Array]:
        """Token ids, positions, slots, query starts, lengths and tables of the rows and of what fills them up."""
        num_real = len(rows)
        positions = np.fromiter((row.start for row in rows), np.int64, num_real)
        tables = np.zeros((num_rows, self._max_blocks), np.int32)
        self._table_rows.fill(tables, rows)
        slots = np.full(num_rows, -1, np.int64)
        offset = positions % self._block_size
        slots[:num_real] = tables[np.arange(num_real), positions // self._block_size] * np.int64(self._block_size) + offset
        return [
            padded(np.fromiter((row.token_ids[0] for row in rows), np.int64, num_real), num_rows),
            padded(positions, num_rows),
            slots,
            np.minimum(np.arange(num_rows + 1, dtype=np.int32), num_real).astype(np.int32),
            padded((positions + 1).astype(np.int32), num_rows),
            tables,
        ]

    @torch.inference_mode()
    def _capture(self, num_rows: int) -> DecodeGraph:
        # Lengths of nobody: every row is padding, so that neither the warm-up nor the capture writes into the pool.
        arrays = [*self._step_arrays((), num_rows), *(padded(part, num_rows) for part in table_arrays(()))]
        inputs = torch.empty(num_bytes(arrays), dtype=torch.uint8, device=self._device)
        self._link.refill(inputs, arrays)
        input_ids, positions, slots, query_start, seq_lens, tables, floats, ints = views(inputs, arrays)
        table = self._chooser.plain_table(floats, ints)
        metadata = AttentionMetadata(
            positions=positions,
            slot_mapping=slots,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=tables,
            max_query_len=1,
            max_seq_len=self._max_context_len,
        )

        def work() -> tuple[Tensor, Sampled]:
            hidden = self._model.forward(input_ids, self._cache.layers, metadata)
            logits = self._model.logits(hidden, out=self._logits[:num_rows])
            return logits, sample(logits, table)

        work()  # compiles, and lets libraries allocate what they can't during a capture
        replay, (logits, sampled) = self._maker.capture(work)
        return DecodeGraph(num_rows, inputs, replay, logits, sampled)


def padded(array: Array, num_rows: int) -> Array:
    """Zeros below, up to so many rows."""
    filled = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    filled[: len(array)] = array
    return filled
