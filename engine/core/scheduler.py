"""Waiting, running and swapped queues to a StepPlan; and the commit of what came of it.

One rule of motion: a step lets each sequence's computed tokens catch up with its tokens.  There is no prefill mode and no
decode mode; a sequence that lacks one token is merely cheap, so those go first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.config import SchedulerLimits, SchedulingPolicy
from pagestream.engine.core.errors import InvariantBroken, OutOfBlocks
from pagestream.engine.core.outputs import FinishReason
from pagestream.engine.core.plan_writer import PlanWriter
from pagestream.engine.core.preemption import PreemptionCosts, PreemptionPolicy
from pagestream.engine.core.request import Request
from pagestream.engine.core.seeds import seed_of_answer
from pagestream.engine.core.sequence import GroupStatus, Sequence, SequenceGroup, num_common_tokens
from pagestream.engine.core.step_plan import Sample, ScheduledSequence, StepPlan
from pagestream.engine.core.step_shares import StepShares
from pagestream.engine.core.stopping import Verdict

MAX_IDLE_PLANS = 3  # in a row: a step may end with a preemption and nothing else

in_order = attrgetter("order")


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    num_preempted_recompute: int = 0
    num_preempted_swap: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_copied_blocks: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_recomputed_tokens: int = 0

    def copy(self) -> SchedulerCounters:
        return replace(self)


class Scheduler:
    """Owns the status of every group: each unfinished group is in exactly one of waiting, running and swapped."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager, costs: PreemptionCosts | None = None):
        self.limits = limits
        self.blocks = blocks
        self.costs = costs or PreemptionCosts()
        self.counters = SchedulerCounters()
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self._policy = PreemptionPolicy(limits.preemption_mode, self.costs, blocks)
        self._plan = PlanWriter(blocks)
        self._shares = StepShares(limits, self._plan)
        self._groups: dict[str, SequenceGroup] = {}
        self._sequences: dict[int, tuple[Sequence, SequenceGroup]] = {}
        self._num_arrived = 0
        self._num_idle_plans = 0

    # ---- arriving and leaving ---------------------------------------------------------------------------------------

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request.  That it can fit the pool at all was checked before: see stopping.most_blocks."""
        num_prompt_tokens = len(request.prompt_token_ids)
        token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        first = Sequence(self._plan.next_seq_id(), 0, token_ids, num_prompt_tokens, seed_of_answer(request.seed, 0))
        priority = request.priority if self.limits.policy is SchedulingPolicy.PRIORITY else 0
        group = SequenceGroup(request, self._num_arrived, (priority, self._num_arrived), first)
        self._num_arrived += 1
        self._groups[request.request_id] = group
        self._sequences[first.seq_id] = (first, group)
        insort(self.waiting, group, key=in_order)
        return group

    def finish(self, request_id: str, reason: FinishReason) -> SequenceGroup | None:
        """End a request now, whatever it is doing; None if it is not here any more."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for sequence in list(group.unfinished):
            self._end_sequence(group, sequence, reason)
        group.num_unborn = 0
        self._retire_group(group)
        return group

    def group(self, request_id: str) -> SequenceGroup | None:
        return self._groups.get(request_id)

    def group_of(self, seq_id: int) -> SequenceGroup:
        return self._sequences[seq_id][1]

    @property
    def num_unfinished(self) -> int:
        return len(self._groups)

    # ---- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Decide one step.  A plan may be empty where nobody is left, or where somebody had to give way."""
        plan = self._plan
        plan.begin(self.limits.max_num_batched_tokens)
        self._make_room()
        lacking = self._shares.place_decodes(self.running)
        num_coming = min(len(self.waiting), self.limits.max_num_seqs - len(self.running))
        self._shares.spare_decodes(self.running, [*(group for group, _ in lacking), *self.waiting[:num_coming]])
        first = self._shares.place_prefills(lacking, 0 if plan.num_preempted else num_coming + len(self.swapped))
        num_reserved = first.num_reserved_tokens if first else 0
        if not plan.num_preempted:
            self._swap_in(num_reserved)
        if not plan.num_preempted and not self.swapped:
            self._admit(num_reserved)
        if first is not None:
            self._shares.place(first.group, first.sequence, plan.num_tokens_left)
        self._num_idle_plans = 0 if plan.rows else self._num_idle_plans + 1
        if self._groups and self._num_idle_plans > MAX_IDLE_PLANS:
            raise InvariantBroken(f"{len(self._groups)} requests are unfinished and none could be scheduled")
        return plan.end()

    def commit(self, plan: StepPlan, verdicts: Mapping[int, Verdict]) -> None:
        """Take over what a successful step computed.  Sequences that were ended meanwhile are passed over, by id."""
        beams: list[tuple[SequenceGroup, ScheduledSequence]] = []
        for row in plan.scheduled:
            known = self._sequences.get(row.seq_id)
            if known is None:
                continue
            sequence, group = known
            sequence.num_computed_tokens = row.start + len(row.token_ids)
            self.blocks.publish(sequence, group.request.cache_salt)
            if group.fork_at and sequence.num_computed_tokens >= group.fork_at:
                self._hand_over(group)
            if row.samples and group.has_beams:
                beams.append((group, row))
                continue
            for sample in row.samples[1:]:
                self._bear(group, sequence, sample)
            if row.samples:
                for sample in row.samples:
                    self._accept(group, sample.seq_id, verdicts)
            elif row.seq_id in verdicts:  # it ends with its prompt, so there is nothing to fork for
                group.num_unborn = 0
                self._accept(group, row.seq_id, verdicts)
            if not group.unfinished and not group.num_unborn:
                self._retire_group(group)
        if beams:
            self._branch(beams, verdicts)

    # ---- parts of schedule ------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Let every running sequence's table cover its tokens; those who must give way for that are preempted."""
        covers = self.blocks.covers
        while self.running:
            wanted = []
            for group in self.running:
                for sequence in group.unfinished:
                    if not covers(sequence):
                        wanted.append((sequence, sequence.num_tokens))
                    if group.fork_at:
                        break  # the others hold nothing yet
            if not wanted or self.blocks.num_new_blocks(wanted) <= self.blocks.device.num_free and self._cover(wanted):
                return
            self._preempt(self._policy.victim(self.running) or self.running[0])

    def _cover(self, wanted: list[tuple[Sequence, int]]) -> bool:
        """Returns whether all could be covered; what was done for some stays done."""
        for sequence, num_tokens in wanted:
            try:
                copies = self.blocks.append(sequence, num_tokens)
            except OutOfBlocks:
                return False
            if copies:
                self._plan.copies[sequence.seq_id] = copies
                self.counters.num_copied_blocks += len(copies)
        return True

    def _preempt(self, group: SequenceGroup) -> None:
        plan = self._plan
        plan.num_preempted += 1
        self.running.remove(group)
        # Blocks that a copy of this very step was to fill have no content yet: they can't be swapped out.
        is_incomplete = [plan.copies.pop(sequence.seq_id, None) for sequence in group.unfinished]
        if not any(is_incomplete) and self._policy.swaps(group):
            copies = self.blocks.swap_out(group.unfinished)
            plan.swap_out += copies
            group.timeline.num_swapped_out_blocks += len(copies)
            group.timeline.num_preemptions_swap += 1
            self.counters.num_swapped_out_blocks += len(copies)
            self.counters.num_preempted_swap += 1
            group.move_to(GroupStatus.SWAPPED)
            insort(self.swapped, group, key=in_order)
            return
        for sequence in group.unfinished:
            self.blocks.free(sequence.seq_id)
        group.timeline.num_preemptions_recompute += 1
        self.counters.num_preempted_recompute += 1
        group.move_to(GroupStatus.WAITING)
        insort(self.waiting, group, key=in_order)

    def _swap_in(self, num_reserved: int) -> None:
        plan = self._plan
        while self.swapped and plan.num_tokens_left > num_reserved:
            group = self.swapped[0]
            if not self._has_place(group) or not self._has_room(self.blocks.num_blocks_to_return(group.unfinished)):
                return
            try:
                copies = self.blocks.swap_in(group.unfinished)
            except OutOfBlocks:
                return
            self.swapped.pop(0)
            plan.swap_in += copies
            group.timeline.num_swapped_in_blocks += len(copies)
            self.counters.num_swapped_in_blocks += len(copies)
            self._run(group)
            if not self._cover([(sequence, sequence.num_tokens) for sequence in group.unfinished]):
                return  # the next step makes room for it
            if group.has_beams and plan.num_tokens_left - num_reserved < len(group.unfinished):
                return  # all beams take their step together: the next one
            for sequence in group.unfinished:
                self._shares.place(group, sequence, plan.num_tokens_left - num_reserved)

    def _admit(self, num_reserved: int) -> None:
        plan, blocks = self._plan, self.blocks
        while self.waiting and plan.num_tokens_left > num_reserved:
            group = self.waiting[0]
            if not self._has_place(group):
                return
            first, *others = group.unfinished
            # Where others will take blocks over, the last of those tokens must be computed, so that there is a step to do it in.
            num_common = num_common_tokens(group.unfinished) if others else 0
            reads_all = group.request.reads_whole_prompt
            prefix = [] if reads_all else blocks.cached_prefix(first, num_common or first.num_tokens, group.request.cache_salt)
            num_blocks = blocks.num_blocks_for(first.num_tokens) - len(prefix) + blocks.num_taken(prefix)
            num_blocks += sum(blocks.num_blocks_for(other.num_tokens) - num_common // blocks.block_size for other in others)
            if not self._has_room(num_blocks):
                return
            try:
                blocks.allocate(first, first.num_tokens, prefix)
            except OutOfBlocks:
                return
            self.waiting.pop(0)
            self._count_admission(group, num_common, len(prefix) * blocks.block_size, reads_all)
            group.fork_at = num_common
            self._run(group)
            self._shares.place(group, first, plan.num_tokens_left - num_reserved)

    def _has_place(self, group: SequenceGroup) -> bool:
        """Whether its sequences fit among those that may run at once."""
        return self._num_running + group.num_live_sequences <= self.limits.max_num_seqs

    def _has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks can be given without driving out those who run: each of them may need one very soon."""
        return self.blocks.device.num_free - num_blocks >= self._num_running

    @property
    def _num_running(self) -> int:
        return sum([len(group.unfinished) + group.num_unborn for group in self.running])

    def _count_admission(self, group: SequenceGroup, num_common_tokens: int, num_cached_tokens: int, reads_all: bool) -> None:
        first, *others = group.unfinished
        if group.timeline.first_step is None:
            group.timeline.num_cached_tokens = num_cached_tokens
            if not reads_all and self.blocks.enable_prefix_caching:
                self.counters.num_prefix_queried_tokens += first.num_tokens
                self.counters.num_prefix_hit_tokens += num_cached_tokens
        else:
            num_lost = max(0, first.num_computed_tokens - num_cached_tokens)
            num_lost += sum(max(0, other.num_computed_tokens - num_common_tokens) for other in others)
            group.timeline.num_recomputed_tokens += num_lost
            self.counters.num_recomputed_tokens += num_lost
        first.num_computed_tokens = num_cached_tokens
        for other in others:
            other.num_computed_tokens = 0

    # ---- parts of commit --------------------------------------------------------------------------------------------

    def _hand_over(self, group: SequenceGroup) -> None:
        """After a recompute: let the others share the first sequence's blocks of what they all begin with."""
        first, *others = group.unfinished
        for other in others:
            self.blocks.fork(first, other, group.fork_at)
            other.num_computed_tokens = group.fork_at
        group.fork_at = 0

    def _bear(self, group: SequenceGroup, parent: Sequence, sample: Sample) -> None:
        """Fork off a sequence that shares all of the parent's tokens and blocks so far."""
        child = Sequence(sample.seq_id, len(group.sequences), list(parent.token_ids), parent.num_prompt_tokens, sample.seed)
        child.num_computed_tokens = parent.num_computed_tokens
        self.blocks.fork(parent, child, parent.num_computed_tokens)
        group.sequences.append(child)
        group.unfinished.append(child)
        group.num_unborn -= 1
        self._sequences[child.seq_id] = (child, group)

    def _branch(self, beams: list[tuple[SequenceGroup, ScheduledSequence]], verdicts: Mapping[int, Verdict]) -> None:
        """One step of beam searches: some beams go on in several ways, others end."""
        # Births first: a parent may end in the same step, and may only append its own token when it has been copied.
        for group, row in beams:
            for sample in row.samples[1:]:
                verdict = verdicts.get(sample.seq_id)
                if verdict is not None and verdict.parent_seq_id is not None:
                    self._bear(group, self._sequences[verdict.parent_seq_id][0], sample)
        for group, row in beams:
            for sample in row.samples:
                self._accept(group, sample.seq_id, verdicts)
        for group in dict.fromkeys(group for group, _ in beams):
            # A place is kept for beams that are yet to be born.
            group.num_unborn = group.request.sampling_params.num_sequences - len(group.unfinished)
            if not group.unfinished:
                self._retire_group(group)

    def _accept(self, group: SequenceGroup, seq_id: int, verdicts: Mapping[int, Verdict]) -> None:
        """Append what the verdict accepts, and end the sequence where it says so."""
        verdict = verdicts.get(seq_id)
        if verdict is None:
            return
        sequence, _ = self._sequences[seq_id]
        sequence.token_ids += verdict.token_ids
        if not group.num_arrived_by_answer:
            group.num_arrived_by_answer = self._num_arrived
        if verdict.finish_reason is not None:
            self._end_sequence(group, sequence, verdict.finish_reason)

    def _end_sequence(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        group.unfinished.remove(sequence)
        if group.has_beams:
            group.sequences.remove(sequence)
        self.blocks.forget(sequence.seq_id)
        del self._sequences[sequence.seq_id]
        self._plan.retire(sequence.seq_id)

    def _retire_group(self, group: SequenceGroup) -> None:
        queue = {GroupStatus.WAITING: self.waiting, GroupStatus.RUNNING: self.running, GroupStatus.SWAPPED: self.swapped}[group.status]
        queue.remove(group)
        group.move_to(GroupStatus.FINISHED)
        del self._groups[group.request.request_id]

    def _run(self, group: SequenceGroup) -> None:
        group.move_to(GroupStatus.RUNNING)
        insort(self.running, group, key=in_order)
