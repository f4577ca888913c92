"""A step's tensors against the same plan read token by token."""

from __future__ import annotations

import random

import numpy as np

from pagestream.engine.core.step_plan import Sample, ScheduledSequence, StepPlan
from pagestream.engine.runner.batch import TableRows, build_batch
from pagestream.kernels.transfer import SharedMemory

BLOCK_SIZE = 4


def row_of(seq_id: int, start: int, num_tokens: int, block_ids: tuple[int, ...], is_last: bool = True) -> ScheduledSequence:
    samples = (Sample(seq_id, seq_id),) if is_last else ()
    return ScheduledSequence(seq_id, tuple(range(start, start + num_tokens)), start, block_ids, samples)


def random_table(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.sample(range(1000), -(-num_tokens // BLOCK_SIZE)))


def filled(table_rows: TableRows, rows: list[ScheduledSequence], width: int) -> np.ndarray:
    tables = np.zeros((len(rows), width), np.int32)
    table_rows.fill(tables, rows)
    return tables


def test_every_token_has_the_slot_and_position_of_its_sequence() -> None:
    rng = random.Random(1)
    for longest in (1, 1, 9):  # decodes alone take a shorter way
        rows = []
        for seq_id in range(rng.randint(1, 6)):
            start, num_tokens = rng.randint(0, 20), rng.randint(1, longest)
            rows.append(row_of(seq_id, start, num_tokens, random_table(rng, start + num_tokens), is_last=rng.random() < 0.7))
        batch = build_batch(StepPlan(1, scheduled=tuple(rows)), BLOCK_SIZE, SharedMemory(), TableRows())
        tokens = [(row, position) for row in rows for position in range(row.start, row.start + len(row.token_ids))]
        assert batch.input_ids.tolist() == [position for _, position in tokens]
        assert batch.metadata.positions.tolist() == [position for _, position in tokens]
        slots = [row.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for row, position in tokens]
        assert batch.metadata.slot_mapping.tolist() == slots
        assert batch.metadata.seq_lens.tolist() == [row.start + len(row.token_ids) for row in rows]
        ends = [index for index, (row, position) in enumerate(tokens) if row.samples and position == row.start + len(row.token_ids) - 1]
        assert batch.sampling_rows.tolist() == ends
        for row, table in zip(rows, batch.metadata.block_tables.tolist(), strict=True):
            assert tuple(table[: len(row.block_table)]) == row.block_table


def test_a_table_that_changed_is_read_anew() -> None:
    """Also where it is as long as before, as after a copy-on-write, and where its sequence left a step out."""
    rng = random.Random(2)
    table_rows = TableRows()
    tables = {seq_id: random_table(rng, 12) for seq_id in range(5)}
    for _ in range(50):
        for seq_id, table in tables.items():
            how = rng.random()
            if how < 0.2:
                tables[seq_id] = (*table[:-1], rng.randrange(1000))
            elif how < 0.4:
                tables[seq_id] = (*table, rng.randrange(1000))
            elif how < 0.5:
                tables[seq_id] = random_table(rng, 12)
        chosen = rng.sample(sorted(tables), rng.randint(1, 5))
        rows = [row_of(seq_id, 0, 1, tables[seq_id]) for seq_id in chosen]
        width = max(len(row.block_table) for row in rows)
        expected = [row.block_table + (0,) * (width - len(row.block_table)) for row in rows]
        assert filled(table_rows, rows, width).tolist() == [list(table) for table in expected]


def test_a_table_longer_than_its_place_is_cut_off() -> None:
    assert filled(TableRows(), [row_of(7, 0, 1, (5, 6, 7))], 2).tolist() == [[5, 6]]
