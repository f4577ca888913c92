"""A state machine over the block manager: whatever is done in whatever order, nothing is lost and nothing shared is written."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.errors import OutOfBlocks
from pagestream.engine.core.sequence import Sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 12
NUM_SWAP_BLOCKS = 8
SALTS = ("", "tenant")


class Held:
    """A sequence of the model: what the manager was told about it."""

    def __init__(self, sequence: Sequence, salt: str):
        self.sequence = sequence
        self.salt = salt
        self.is_swapped = False


def distinct(*drawn: Held) -> list[Held]:
    return list({held.sequence.seq_id: held for held in drawn}.values())


class BlockManagerMachine(RuleBasedStateMachine):
    """Simulates the cache's contents beside the manager: each slot holds the tokens it was written for."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, num_swap_blocks=NUM_SWAP_BLOCKS)
        self.live: dict[int, Held] = {}
        self.device = {block: [None] * BLOCK_SIZE for block in range(NUM_BLOCKS)}
        self.host = {block: [None] * BLOCK_SIZE for block in range(NUM_SWAP_BLOCKS)}
        self.num_born = 0

    def born(self, token_ids: list[int], num_prompt: int, salt: str) -> Held:
        self.num_born += 1
        return Held(Sequence(self.num_born, 0, token_ids, num_prompt, 0), salt)

    def snapshot(self):
        tables = {seq_id: self.manager.table(seq_id) for seq_id in self.live if self.manager.has_table(seq_id)}
        return tables, self.manager.device.num_free, self.manager.host.num_free

    def compute(self, held: Held) -> None:
        """What a step does: write every uncomputed token's slot, then publish."""
        sequence = held.sequence
        table = self.manager.table(sequence.seq_id)
        for position in range(sequence.num_computed_tokens, sequence.num_tokens):
            block = self.manager.device.blocks[table[position // BLOCK_SIZE]]
            assert block.ref_count == 1, "a shared block is written"
            assert block.prefix_hash is None, "a published block is written"
            self.device[block.block_id][position % BLOCK_SIZE] = (held.salt, tuple(sequence.token_ids[: position + 1]))
        sequence.num_computed_tokens = sequence.num_tokens
        self.manager.publish(sequence, held.salt)

    @rule(target=sequences, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=24), salt=st.sampled_from(SALTS))
    def allocate(self, token_ids, salt):
        held = self.born(token_ids, len(token_ids), salt)
        prefix = self.manager.cached_prefix(held.sequence, len(token_ids), salt)
        assert len(prefix) * BLOCK_SIZE < len(token_ids), "nothing left to compute"
        before = self.snapshot()
        try:
            self.manager.allocate(held.sequence, len(token_ids), prefix)
        except OutOfBlocks:
            assert self.snapshot() == before
            return multiple()
        held.sequence.num_computed_tokens = len(prefix) * BLOCK_SIZE
        self.live[held.sequence.seq_id] = held
        self.compute(held)
        return held

    @rule(held=sequences, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def append(self, held, token_ids):
        if held.is_swapped or held.sequence.seq_id not in self.live:
            return
        before = self.snapshot()
        held.sequence.token_ids += token_ids
        needed = self.manager.num_new_blocks([(held.sequence, held.sequence.num_tokens)])
        try:
            copies = self.manager.append(held.sequence, held.sequence.num_tokens)
        except OutOfBlocks:
            assert needed > before[1], "enough blocks were free"
            assert self.snapshot() == before
            del held.sequence.token_ids[-len(token_ids) :]
            return
        assert self.manager.device.num_free == before[1] - needed
        for copy in copies:
            self.device[copy.target] = list(self.device[copy.source])
        self.compute(held)

    @rule(target=sequences, held=sequences, data=st.data())
    def fork(self, held, data):
        if held.is_swapped or held.sequence.seq_id not in self.live:
            return multiple()
        parent = held.sequence
        num_tokens = data.draw(st.integers(1, parent.num_computed_tokens))
        child = self.born(parent.token_ids[:num_tokens], min(parent.num_prompt_tokens, num_tokens), held.salt)
        child.sequence.num_computed_tokens = num_tokens
        num_free = self.manager.device.num_free
        self.manager.fork(parent, child.sequence, num_tokens)
        assert self.manager.device.num_free == num_free
        self.live[child.sequence.seq_id] = child
        return child

    @rule(held=consumes(sequences))
    def free(self, held):
        self.live.pop(held.sequence.seq_id, None)
        self.manager.free(held.sequence.seq_id)
        self.manager.free(held.sequence.seq_id)  # twice is as good as once

    # Each drawn by itself: a list of them may also be tried while there are none, and so many vain tries fail the run.
    @rule(first=sequences, second=sequences, third=sequences)
    def swap_out(self, first, second, third):
        chosen = [held for held in distinct(first, second, third) if not held.is_swapped and held.sequence.seq_id in self.live]
        before = self.snapshot()
        try:
            copies = self.manager.swap_out([held.sequence for held in chosen])
        except OutOfBlocks:
            assert self.snapshot() == before
            return
        for copy in copies:
            self.host[copy.target] = list(self.device[copy.source])
        for held in chosen:
            held.is_swapped = True

    @rule(first=sequences, second=sequences, third=sequences)
    def swap_in(self, first, second, third):
        chosen = [held for held in distinct(first, second, third) if held.is_swapped and held.sequence.seq_id in self.live]
        before = self.snapshot()
        try:
            copies = self.manager.swap_in([held.sequence for held in chosen])
        except OutOfBlocks:
            assert self.snapshot() == before
            return
        for copy in copies:
            self.device[copy.target] = list(self.host[copy.source])
        for held in chosen:
            held.is_swapped = False

    @rule(salt=st.sampled_from(SALTS), token_ids=st.lists(st.integers(0, 1), min_size=5, max_size=24))
    def look_up(self, salt, token_ids):
        stranger = self.born(token_ids, len(token_ids), salt).sequence
        for index, block in enumerate(self.manager.cached_prefix(stranger, len(token_ids), salt)):
            for offset in range(BLOCK_SIZE):
                position = index * BLOCK_SIZE + offset
                assert self.device[block.block_id][offset] == (salt, tuple(token_ids[: position + 1])), "a stranger's block"

    @invariant()
    def nothing_is_lost(self):
        self.manager.check()
        tables = [self.manager.table(seq_id) for seq_id, held in self.live.items() if not held.is_swapped]
        held_blocks = Counter(block for table in tables for block in table)
        assert self.manager.device.num_free + len(held_blocks) == NUM_BLOCKS

    @invariant()
    def everybody_finds_his_own_tokens(self):
        for seq_id, held in self.live.items():
            if held.is_swapped:
                continue
            table = self.manager.table(seq_id)
            for position in range(held.sequence.num_computed_tokens):
                content = self.device[table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                assert content == (held.salt, tuple(held.sequence.token_ids[: position + 1]))

    @invariant()
    def a_published_block_is_full_and_computed(self):
        for block in self.manager.device.blocks:
            if block.prefix_hash is not None:
                assert None not in self.device[block.block_id]

    def teardown(self):
        for seq_id in list(self.live):
            self.manager.free(seq_id)
        self.manager.check()
        assert self.manager.device.num_free == NUM_BLOCKS
        assert self.manager.host.num_free == NUM_SWAP_BLOCKS


TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=600, stateful_step_count=20, deadline=None)


@pytest.mark.slow
def test_block_manager_for_long():
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(BlockManagerMachine, settings=settings(max_examples=20_000, stateful_step_count=50, deadline=None))


def num_cached(manager: BlockManager, token_ids: list[int], salt: str = "") -> int:
    """Blocks of the longest known prefix, looked up for a sequence that nobody has seen."""
    stranger = Sequence(-1, 0, token_ids, len(token_ids), 0)
    found = manager.cached_prefix(stranger, len(token_ids), salt)
    manager.forget(-1)
    return len(found)


def test_least_recently_used_prefix_goes_first_and_a_tail_before_its_head():
    manager = BlockManager(4, BLOCK_SIZE)
    old, new = (Sequence(seq_id, 0, [seq_id] * 8, 8, 0) for seq_id in (1, 2))
    for sequence in (old, new):
        manager.allocate(sequence, 8)
        sequence.num_computed_tokens = 8
        manager.publish(sequence, "")
    manager.free(old.seq_id)
    manager.free(new.seq_id)
    known = {seq_id: lambda seq_id=seq_id: num_cached(manager, [seq_id] * 9) for seq_id in (1, 2)}
    assert (known[1](), known[2]()) == (2, 2)
    lengths = []
    for seq_id in range(3, 7):
        manager.allocate(Sequence(seq_id, 0, [9], 1, 0), 1)
        lengths.append((known[1](), known[2]()))
    assert lengths == [(1, 2), (0, 2), (0, 1), (0, 0)]


def test_salts_keep_tenants_apart():
    manager = BlockManager(8, BLOCK_SIZE)
    sequence = Sequence(1, 0, [5] * 8, 8, 0)
    manager.allocate(sequence, 8)
    sequence.num_computed_tokens = 8
    manager.publish(sequence, "one")
    assert num_cached(manager, [5] * 9, "one") == 2
    assert num_cached(manager, [5] * 9, "two") == 0
    assert num_cached(manager, [5] * 9) == 0
    assert num_cached(manager, [5] * 9, "\ud800") == 0  # half a surrogate pair: any text is a salt


def test_the_last_holder_of_a_shared_block_writes_in_place():
    manager = BlockManager(8, BLOCK_SIZE)
    parent = Sequence(1, 0, [1] * 6, 6, 0)
    manager.allocate(parent, 6)
    parent.num_computed_tokens = 6
    child = Sequence(2, 1, [1] * 6, 6, 0)
    child.num_computed_tokens = 6
    manager.fork(parent, child, 6)
    for sequence in (parent, child):
        sequence.token_ids.append(2)
    assert manager.num_new_blocks([(parent, 7), (child, 7)]) == 1
    assert len(manager.append(parent, 7)) == 1
    assert manager.append(child, 7) == []
    assert manager.table(1)[0] == manager.table(2)[0]
    assert manager.table(1)[1] != manager.table(2)[1]
