"""What the engine holds at this moment, block by block and request by request, for whoever looks on.

State is consistent between steps only, so a view is taken there: at once while no step runs, else when the one in progress
ends.  As long as nobody looks, a step costs one comparison more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pagestream.engine.core.block_pool import BlockPool
from pagestream.engine.core.sequence import GroupStatus, SequenceGroup
from pagestream.engine.core.step_plan import StepPlan
from pagestream.engine.llm_engine import LLMEngine
from pagestream.engine.metrics import StepStats

CACHED, COPIED = 1, 2


class LiveBlock(NamedTuple):
    """A block that somebody holds, or whose content can be found again.

    Unlike its neighbours a named tuple: a view has one for each block of the pool.
    """

    owner: int | None  # the number of the first request in line that holds it; None: nobody does
    ref_count: int  # above 1: shared, and copied before anybody writes it
    flags: int  # CACHED: its content can be found by its hash; COPIED: on write, since the last view


FREE_CACHED = LiveBlock(None, 0, CACHED)  # most of a busy pool: one for all of them


@dataclass(frozen=True, slots=True)
class LivePool:
    """One device's blocks; those not listed are free and of unknown content."""

    num_blocks: int
    num_free: int
    blocks: Mapping[int, LiveBlock]


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One unfinished request.  `tables` has the blocks of each of its answers that goes on, in the swap pool if it is swapped."""

    number: int  # in the order of arrival; no two requests of one engine share it
    request_id: str
    status: str  # waiting | running | swapped
    arrival_s: float  # on the clock of `EngineView.now_s`
    max_tokens: int  # of each answer
    num_answers: int
    num_prompt_tokens: int
    num_computed_tokens: int  # of the answer that is furthest
    num_output_tokens: int  # of all answers
    num_cached_tokens: int
    num_preempted_recompute: int
    num_preempted_swap: int
    num_steps: int
    tables: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class LiveTotals:
    """Sums over the steps that were looked at; rates are differences of two views."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_sampled_tokens: int = 0
    num_copied_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_preempted: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    schedule_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    detokenize_s: float = 0.0

    def add(self, plan: StepPlan, stats: StepStats) -> None:
        self.num_steps += 1
        self.num_scheduled_tokens += stats.num_scheduled_tokens
        self.num_sampled_tokens += sum(len(row.samples) for row in plan.scheduled)
        self.num_copied_blocks += stats.num_copied_blocks
        self.num_swapped_out_blocks += stats.num_swapped_out_blocks
        self.num_swapped_in_blocks += stats.num_swapped_in_blocks
        self.num_preempted += stats.num_preempted_recompute + stats.num_preempted_swap
        self.num_queried_tokens += stats.num_prefix_queried_tokens
        self.num_hit_tokens += stats.num_prefix_hit_tokens
        self.schedule_s += stats.schedule_s
        self.forward_s += stats.forward_s
        self.sample_s += stats.sample_s
        self.detokenize_s += stats.detokenize_s


@dataclass(frozen=True, slots=True)
class EngineView:
    """Between two steps.  `requests` are in the order of service: running, swapped, waiting."""

    now_s: float
    block_size: int
    device: LivePool
    host: LivePool
    requests: tuple[LiveRequest, ...]
    totals: LiveTotals = field(default_factory=LiveTotals)
    cost_s: float = 0.0  # what taking it cost


class LiveView:
    """Watches the steps while somebody looks.  Everything here runs on the event loop but `_see`, which the step calls."""

    def __init__(self, engine: LLMEngine):
        self._engine = engine
        self._totals = LiveTotals()
        self._copied: set[int] = set()
        self._num_watchers = 0
        self._asked: list[asyncio.Future[EngineView]] = []

    def open(self) -> None:
        """One more who looks on; to be closed as often as opened."""
        self._num_watchers += 1
        self._engine.observer = self._see

    def close(self) -> None:
        self._num_watchers -= 1
        if not self._num_watchers:
            self._engine.observer = None

    @property
    def is_asked(self) -> bool:
        """Whether somebody waits for the end of a step; on any thread."""
        return bool(self._asked)

    def between_steps(self) -> None:
        """Answer those who asked while a step ran."""
        if self._asked:
            asked, self._asked = self._asked, []
            view = self.take()
            for future in asked:
                if not future.done():
                    future.set_result(view)

    def fail(self, error: Exception) -> None:
        """No step will end any more."""
        asked, self._asked = self._asked, []
        for future in asked:
            if not future.done():
                future.set_exception(error)

    async def at_next_step(self) -> EngineView:
        future: asyncio.Future[EngineView] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        return await future

    def take(self) -> EngineView:
        """The state of this moment.  Only between steps."""
        start_s = time.perf_counter()
        scheduler = self._engine.scheduler
        blocks = scheduler.blocks
        requests = []
        owners: dict[int, int] = {}
        swapped_owners: dict[int, int] = {}
        for group in (*scheduler.running, *scheduler.swapped, *scheduler.waiting):
            is_swapped = group.status is GroupStatus.SWAPPED
            owned = swapped_owners if is_swapped else owners
            table_of = blocks.swapped_table if is_swapped else blocks.table
            tables = tuple(table_of(each.seq_id) for each in group.unfinished if blocks.holds(each.seq_id))
            for table in tables:
                for block_id in table:
                    owned.setdefault(block_id, group.arrival_order)
            requests.append(live_request(group, tables))
        copied, self._copied = self._copied, set()
        return EngineView(
            now_s=time.monotonic(),
            block_size=blocks.block_size,
            device=live_pool(blocks.device, owners, copied),
            host=live_pool(blocks.host, swapped_owners, set()),
            requests=tuple(requests),
            totals=replace(self._totals),
            cost_s=time.perf_counter() - start_s,
        )

    def _see(self, plan: StepPlan, stats: StepStats) -> None:
        self._totals.add(plan, stats)
        self._copied.update(copy.target for copy in plan.copies)


def live_request(group: SequenceGroup, tables: tuple[tuple[int, ...], ...]) -> LiveRequest:
    timeline, request = group.timeline, group.request
    return LiveRequest(
        number=group.arrival_order,
        request_id=request.request_id,
        status=group.status.value,
        arrival_s=request.arrival_time_s,
        max_tokens=request.max_tokens,
        num_answers=request.sampling_params.num_sequences,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_computed_tokens=max([each.num_computed_tokens for each in group.unfinished], default=0),
        num_output_tokens=sum([each.num_output_tokens for each in group.sequences]),
        num_cached_tokens=timeline.num_cached_tokens,
        num_preempted_recompute=timeline.num_preemptions_recompute,
        num_preempted_swap=timeline.num_preemptions_swap,
        num_steps=timeline.num_steps,
        tables=tables,
    )


def live_pool(pool: BlockPool, owners: Mapping[int, int], copied: set[int]) -> LivePool:
    blocks = {block.block_id: FREE_CACHED for block in pool.cached_blocks() if not block.ref_count}
    for block_id, owner in owners.items():
        block = pool.blocks[block_id]
        flags = CACHED * (block.prefix_hash is not None) + COPIED * (block_id in copied)
        blocks[block_id] = LiveBlock(owner, block.ref_count, flags)
    return LivePool(pool.num_blocks, pool.num_free, blocks)
