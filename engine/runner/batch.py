"""StepPlan to tensors: the only place that flattens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
from torch import Tensor

from pagestream.engine.attention.base import AttentionMetadata
from pagestream.engine.core.step_plan import ScheduledSequence, StepPlan
from pagestream.kernels.transfer import Array, HostLink


@dataclass(frozen=True, slots=True)
class Batch:
    """The ragged batch of one step, and which of its token rows want logits."""

    input_ids: Tensor  # [T] int64
    metadata: AttentionMetadata
    sampling: tuple[ScheduledSequence, ...]  # those with samples, in the plan's order
    sampling_rows: Tensor  # [R] int64: the last token of each of them
    scored: tuple[tuple[ScheduledSequence, int], ...]  # prompt logprobs: the sequence, and the row of its first token
    pooled: tuple[tuple[int, slice], ...]  # embeddings: the seq_id, and the rows of its tokens that belong to it


class TableRows:
    """Block tables as arrays.  In most steps a sequence has the very tuple of the step before, and its array is kept."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, ...], Array]] = {}  # of the last step, by seq_id

    def fill(self, tables: Array, rows: Sequence[ScheduledSequence]) -> None:
        """tables: [at least len(rows), width] int32, where each row's table is put as far as it reaches."""
        last, self._known = self._known, {}
        width = tables.shape[1]
        for index, row in enumerate(rows):
            known = last.get(row.seq_id)
            if known is None or known[0] is not row.block_table:
                known = row.block_table, np.array(row.block_table, np.int32)
            self._known[row.seq_id] = known
            num_blocks = min(len(row.block_table), width)
            tables[index, :num_blocks] = known[1][:num_blocks]


def build_batch(plan: StepPlan, block_size: int, link: HostLink, table_rows: TableRows) -> Batch:
    """Flatten the scheduled sequences in their order.  The plan must have at least one."""
    scheduled = plan.scheduled
    num_rows = len(scheduled)
    num_new = [len(row.token_ids) for row in scheduled]
    starts = [row.start for row in scheduled]
    width = max(len(row.block_table) for row in scheduled)
    tables = np.zeros((num_rows, width), np.int32)
    table_rows.fill(tables, scheduled)
    if max(num_new) == 1:
        token_ids = [row.token_ids[0] for row in scheduled]
        slots_of_rows = [row.block_table[row.start // block_size] * block_size + row.start % block_size for row in scheduled]
        input_ids, positions, slots = np.array([token_ids, starts, slots_of_rows], np.int64)
        query_start = np.arange(num_rows + 1)
    else:
        input_ids = np.fromiter(chain.from_iterable(row.token_ids for row in scheduled), np.int64, sum(num_new))
        query_start = np.array([0, *accumulate(num_new)], np.int64)
        row_of_token = np.repeat(np.arange(num_rows), num_new)
        positions = np.arange(len(input_ids)) + (np.array(starts) - query_start[:-1])[row_of_token]
        slots = tables[row_of_token, positions // block_size].astype(np.int64) * block_size + positions % block_size
    seq_lens = [start + count for start, count in zip(starts, num_new, strict=True)]

    sampling = [index for index, row in enumerate(scheduled) if row.samples]
    last_rows = query_start[1:] - 1
    ids, where, slot_mapping, sampled_rows, query_starts, lens, block_tables = link.upload([
        input_ids,
        positions,
        slots,
        last_rows if len(sampling) == num_rows else last_rows[sampling],
        query_start.astype(np.int32),
        np.array(seq_lens, np.int32),
        tables,
    ])
    return Batch(
        input_ids=ids,
        metadata=AttentionMetadata(
            positions=where,
            slot_mapping=slot_mapping,
            query_start=query_starts,
            seq_lens=lens,
            block_tables=block_tables,
            max_query_len=max(num_new),
            max_seq_len=max(seq_lens),
        ),
        sampling=scheduled if len(sampling) == num_rows else tuple(scheduled[index] for index in sampling),
        sampling_rows=sampled_rows,
        scored=tuple((row, int(query_start[index])) for index, row in enumerate(scheduled) if row.scored_token_ids),
        pooled=tuple(
            (row.seq_id, slice(int(query_start[index + 1]) - row.num_pooled, int(query_start[index + 1])))
            for index, row in enumerate(scheduled)
            if row.num_pooled
        ),
    )
