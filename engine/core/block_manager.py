"""Block tables of sequences: allocate, fork with copy-on-write, swap out and in, free, and the prefix cache's look-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from pagestream.engine.core.block_pool import Block, BlockPool
from pagestream.engine.core.errors import InvariantBroken, OutOfBlocks
from pagestream.engine.core.prefix_hash import next_hash, root_hash
from pagestream.engine.core.sequence import Sequence
from pagestream.engine.core.step_plan import BlockCopy


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    __slots__ = ("_ids", "blocks", "num_published", "num_writable_tokens")

    def __init__(self, blocks: list[Block], num_published: int = 0):
        self.blocks = blocks
        self.num_published = num_published  # leading blocks that were made findable, by whichever holder of their content
        # The sequence may write up to here without asking: its own blocks.  0: not known, ask.
        self.num_writable_tokens = 0
        self._ids: tuple[int, ...] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Made anew only after a change: most steps leave most tables as they are."""
        if self._ids is None or len(self._ids) != len(self.blocks):
            self._ids = tuple([block.block_id for block in self.blocks])
        return self._ids

    def replace(self, position: int, block: Block) -> None:
        self.blocks[position] = block
        self._ids = None


class BlockManager:
    """Owns every block table and reference count.

    A sequence's table is on the device or in the swap pool, never in both.  A block that several tables share is never
    written: the writer gets a copy first.  A published block is full and computed, so nobody writes it again.
    """

    def __init__(self, num_blocks: int, block_size: int, *, num_swap_blocks: int = 0, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.device = BlockPool(num_blocks)
        self.host = BlockPool(num_swap_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[int, BlockTable] = {}
        self._swapped: dict[int, BlockTable] = {}
        # Per sequence, the hashes of its full blocks as far as somebody asked, computed or not: its tokens never change.
        self._chains: dict[int, list[bytes]] = {}

    # ---- questions --------------------------------------------------------------------------------------------------

    def table(self, seq_id: int) -> tuple[int, ...]:
        return self._tables[seq_id].ids

    def swapped_table(self, seq_id: int) -> tuple[int, ...]:
        return self._swapped[seq_id].ids

    def holds(self, seq_id: int) -> bool:
        """Whether it has a table, on either side."""
        return seq_id in self._tables or seq_id in self._swapped

    def has_table(self, seq_id: int) -> bool:
        return seq_id in self._tables

    def covers(self, sequence: Sequence) -> bool:
        """Whether all its tokens have a slot that it may write.  False may also mean that `append` has yet to find out."""
        return len(sequence.token_ids) <= self._tables[sequence.seq_id].num_writable_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_new_blocks(self, wanted: SequenceOf[tuple[Sequence, int]]) -> int:
        """Blocks that covering so many tokens of each sequence takes from the pool, copies before writing included."""
        return self._num_growth(wanted, self._tables, self.device)

    def num_blocks_to_return(self, sequences: SequenceOf[Sequence]) -> int:
        """Device blocks that swapped-out sequences need to come back and go on."""
        wanted = [(sequence, sequence.num_tokens) for sequence in sequences]
        return self.num_distinct(sequences) + self._num_growth(wanted, self._swapped, self.host)

    def _num_growth(self, wanted: SequenceOf[tuple[Sequence, int]], tables: Mapping[int, BlockTable], pool: BlockPool) -> int:
        num_new = 0
        writers: Counter[int] = Counter()
        for sequence, num_tokens in wanted:
            blocks = tables[sequence.seq_id].blocks
            num_new += max(0, -(-num_tokens // self.block_size) - len(blocks))
            tail = sequence.num_computed_tokens // self.block_size
            if tail < len(blocks) and blocks[tail].ref_count > 1:
                writers[blocks[tail].block_id] += 1
        for block_id, num_writers in writers.items():
            # The last holder of a shared block writes in place.
            num_new += num_writers - (pool.blocks[block_id].ref_count == num_writers)
        return num_new

    def num_distinct(self, sequences: SequenceOf[Sequence]) -> int:
        """Different blocks that these sequences hold, on the device or swapped out."""
        tables = [self._tables.get(sequence.seq_id) or self._swapped.get(sequence.seq_id) for sequence in sequences]
        if len(tables) == 1:
            return len(tables[0].blocks) if tables[0] else 0
        return len({block.block_id for table in tables if table for block in table.blocks})

    # ---- the prefix cache -------------------------------------------------------------------------------------------

    def cached_prefix(self, sequence: Sequence, num_tokens: int, cache_salt: str) -> list[Block]:
        """Blocks of the longest known prefix of so many tokens, at most all but one: one must be computed to get logits."""
        found: list[Block] = []
        if not self.enable_prefix_caching:
            return found
        chain = self._chains.setdefault(sequence.seq_id, [])
        for position in range((num_tokens - 1) // self.block_size):
            if position == len(chain):
                self._extend(chain, sequence, cache_salt)
            block = self.device.find(chain[position])
            if block is None:
                break
            found.append(block)
        return found

    def num_taken(self, prefix: SequenceOf[Block]) -> int:
        """How many of these blocks are free now, and so would be taken from the pool."""
        return sum(block.ref_count == 0 for block in prefix)

    def publish(self, sequence: Sequence, cache_salt: str) -> None:
        """Make the sequence's newly full and computed blocks findable; called when a step has succeeded, never before."""
        table = self._tables[sequence.seq_id]
        num_full = sequence.num_computed_tokens // self.block_size
        if table.num_published >= num_full or not self.enable_prefix_caching:
            return
        chain = self._chains.setdefault(sequence.seq_id, [])
        while len(chain) < num_full:
            self._extend(chain, sequence, cache_salt)
        for position in range(table.num_published, num_full):
            self.device.publish(table.blocks[position], chain[position])
        table.num_published = num_full

    def _extend(self, chain: list[bytes], sequence: Sequence, cache_salt: str) -> None:
        """Add the hash of the next full block."""
        start = len(chain) * self.block_size
        parent = chain[-1] if chain else root_hash(cache_salt)
        chain.append(next_hash(parent, sequence.token_ids[start : start + self.block_size]))

    # ---- changes ----------------------------------------------------------------------------------------------------

    def allocate(self, sequence: Sequence, num_tokens: int, prefix: SequenceOf[Block] = ()) -> None:
        """Give a sequence its first table, beginning with the shared blocks of `prefix`.  Raises OutOfBlocks, changing nothing."""
        num_new = self.num_blocks_for(num_tokens) - len(prefix)
        for block in prefix:
            self.device.share(block)
        try:
            new = take(self.device, num_new)
        except OutOfBlocks:
            for block in reversed(prefix):
                self.device.release(block)
            raise
        table = self._tables[sequence.seq_id] = BlockTable([*prefix, *new], len(prefix))
        table.num_writable_tokens = len(table.blocks) * self.block_size  # what was computed before is not written again

    def append(self, sequence: Sequence, num_tokens: int) -> list[BlockCopy]:
        """Make the table cover `num_tokens`, and its blocks from the first uncomputed token on this sequence's own.

        Returns the copies to do before anything is written.  Raises OutOfBlocks, changing nothing.
        """
        table = self._tables[sequence.seq_id]
        blocks = table.blocks
        num_new = -(-num_tokens // self.block_size) - len(blocks)
        tail = sequence.num_computed_tokens // self.block_size
        must_copy = tail < len(blocks) and blocks[tail].ref_count > 1
        new = take(self.device, max(num_new, 0) + must_copy)
        copies = []
        if must_copy:
            shared, own = blocks[tail], new.pop()
            copies.append(BlockCopy(shared.block_id, own.block_id))
            table.replace(tail, own)
            self.device.release(shared)
        elif tail < len(blocks):
            self.device.withdraw(blocks[tail])
        table.num_published = min(table.num_published, tail)
        blocks += new
        table.num_writable_tokens = len(blocks) * self.block_size
        return copies

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let the child share the parent's blocks of the first `num_tokens` tokens, which are computed."""
        table = self._tables[parent.seq_id]
        shared = table.blocks[: self.num_blocks_for(num_tokens)]
        for block in shared:
            self.device.share(block)
        num_full = num_tokens // self.block_size
        self._tables[child.seq_id] = BlockTable(shared, min(table.num_published, num_full))
        table.num_writable_tokens = 0
        if self.enable_prefix_caching:
            self._chains[child.seq_id] = self._chains.get(parent.seq_id, [])[:num_full]

    def free(self, seq_id: int) -> None:
        """Give back whatever the sequence holds, on either side; nothing if it holds nothing."""
        for pool, tables in ((self.device, self._tables), (self.host, self._swapped)):
            table = tables.pop(seq_id, None)
            # From the tail: the head of a prompt is what others share, so it should be evicted last.
            for block in reversed(table.blocks if table else ()):
                pool.release(block)

    def forget(self, seq_id: int) -> None:
        """Free a sequence that will never come back."""
        self.free(seq_id)
        self._chains.pop(seq_id, None)

    def swap_out(self, sequences: SequenceOf[Sequence]) -> list[BlockCopy]:
        """Move the tables to the swap pool; shared blocks stay shared.  Raises OutOfBlocks, changing nothing."""
        return self._move(sequences, self._tables, self.device, self._swapped, self.host)

    def swap_in(self, sequences: SequenceOf[Sequence]) -> list[BlockCopy]:
        """Move the tables back to the device.  Raises OutOfBlocks, changing nothing."""
        return self._move(sequences, self._swapped, self.host, self._tables, self.device)

    def _move(
        self,
        sequences: SequenceOf[Sequence],
        tables: dict[int, BlockTable],
        pool: BlockPool,
        new_tables: dict[int, BlockTable],
        new_pool: BlockPool,
    ) -> list[BlockCopy]:
        block_ids = dict.fromkeys(block.block_id for sequence in sequences for block in tables[sequence.seq_id].blocks)
        moved = dict(zip(block_ids, take(new_pool, len(block_ids)), strict=True))
        for sequence in sequences:
            # Nothing of it is published: whoever comes back is published again, with the step that brought it.
            table = new_tables[sequence.seq_id] = BlockTable([moved[block.block_id] for block in tables[sequence.seq_id].blocks])
            for target in table.blocks:
                new_pool.share(target)
        for target in moved.values():
            new_pool.release(target)  # the reference it was born with
        for sequence in sequences:
            for block in reversed(tables.pop(sequence.seq_id).blocks):
                pool.release(block)
        return [BlockCopy(source, target.block_id) for source, target in moved.items()]

    # ---- the proof --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises InvariantBroken unless references, tables, free lists and hashes agree.  For idle moments and tests."""
        for name, pool, tables in (("device", self.device, self._tables), ("host", self.host, self._swapped)):
            held = Counter(block.block_id for table in tables.values() for block in table.blocks)
            for block in pool.blocks:
                if block.ref_count != held[block.block_id]:
                    raise InvariantBroken(f"{name} block {block.block_id}: {block.ref_count} references, {held[block.block_id]} holders")
                if block.prefix_hash is not None and pool.find(block.prefix_hash) is not block:
                    raise InvariantBroken(f"{name} block {block.block_id} has a hash by which another is found")
            if pool.num_free + len(held) != pool.num_blocks:
                raise InvariantBroken(f"{name}: {pool.num_free} free and {len(held)} held blocks of {pool.num_blocks}")
        if both := self._tables.keys() & self._swapped.keys():
            raise InvariantBroken(f"sequences {sorted(both)} are on the device and swapped out")


def take(pool: BlockPool, num_blocks: int) -> list[Block]:
    """So many blocks of unknown content, or none: raises OutOfBlocks and has changed nothing then."""
    taken: list[Block] = []
    try:
        for _ in range(num_blocks):
            taken.append(pool.allocate())
    except OutOfBlocks:
        for block in reversed(taken):
            pool.release(block)
        raise
    return taken
