"""The blocks of one device: who is free, in which order the free ones are given away, and which can be found by their hash."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from pagestream.engine.core.errors import InvariantBroken, OutOfBlocks


class Block:
    """Metadata of one KV block; the tensors know nothing of it."""

    __slots__ = ("block_id", "prefix_hash", "ref_count")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.prefix_hash: bytes | None = None  # set only when the block is full and computed


class BlockObserver(Protocol):
    """Told of a pool's moves; must return quickly and never raise."""

    def taken(self, block_id: int, was_known: bool) -> None: ...  # for new content; was_known: the old could have been found
    def found_again(self, block_id: int) -> None: ...  # by its hash, and nobody held it
    def left(self, block_id: int) -> None: ...  # by the last who held it


class BlockPool:
    """A block is free or referenced, never both; only this class moves it.

    A free block may still hold a known prefix and be taken back by its hash until it is given to somebody else.
    """

    def __init__(self, num_blocks: int):
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        # In the order of giving away: blocks of no known content first, then the least recently used.
        self._free: OrderedDict[int, Block] = OrderedDict((block.block_id, block) for block in self.blocks)
        self._by_hash: dict[bytes, Block] = {}
        self.observer: BlockObserver | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def cached_blocks(self) -> Iterable[Block]:
        """Those that can be found by their hash, free or not."""
        return self._by_hash.values()

    def allocate(self) -> Block:
        """A free block of unknown content, with one reference.  Raises OutOfBlocks."""
        if not self._free:
            raise OutOfBlocks
        _, block = self._free.popitem(last=False)
        if self.observer is not None:
            self.observer.taken(block.block_id, block.prefix_hash is not None)
        self.withdraw(block)
        block.ref_count = 1
        return block

    def find(self, prefix_hash: bytes) -> Block | None:
        return self._by_hash.get(prefix_hash)

    def share(self, block: Block) -> None:
        """One more reference, also to a free block whose content is known."""
        if block.ref_count == 0:
            del self._free[block.block_id]
            if self.observer is not None:
                self.observer.found_again(block.block_id)
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One reference less; the last one frees the block."""
        if block.ref_count < 1:
            raise InvariantBroken(f"block {block.block_id} was released more often than taken")
        block.ref_count -= 1
        if block.ref_count == 0:
            self._free[block.block_id] = block
            if block.prefix_hash is None:
                self._free.move_to_end(block.block_id, last=False)
            if self.observer is not None:
                self.observer.left(block.block_id)

    def publish(self, block: Block, prefix_hash: bytes) -> None:
        """Make a full and computed block findable.  Where another block holds the same prefix, that one stays the known one."""
        if block.prefix_hash is None and prefix_hash not in self._by_hash:
            block.prefix_hash = prefix_hash
            self._by_hash[prefix_hash] = block

    def withdraw(self, block: Block) -> None:
        """Make a block unfindable before its only holder writes it: one that was forked off within the block."""
        if block.prefix_hash is not None:
            del self._by_hash[block.prefix_hash]
            block.prefix_hash = None
