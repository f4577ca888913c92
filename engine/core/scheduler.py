"""Waiting, running and swapped queues to a StepPlan; and the commit of what came of it.

One rule of motion: a step lets each sequence's computed tokens catch up with its tokens.  There is no prefill mode and no
decode mode; a sequence that lacks one token is merely cheap, so those go first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.config import PreemptionMode, SchedulingPolicy
from pagestream.engine.core.errors import InvariantBroken, OutOfBlocks
from pagestream.engine.core.outputs import FinishReason
from pagestream.engine.core.preemption import PreemptionCosts, PreemptionPolicy
from pagestream.engine.core.request import Request
from pagestream.engine.core.seeds import seed_of_answer
from pagestream.engine.core.sequence import GroupStatus, Sequence, SequenceGroup
from pagestream.engine.core.step_plan import Admitted, BlockCopy, Sample, ScheduledSequence, StepPlan
from pagestream.engine.core.stopping import Verdict

MAX_IDLE_PLANS = 3  # in a row: a step may end with a preemption and nothing else


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    preemption_mode: PreemptionMode = PreemptionMode.AUTO


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


@dataclass(slots=True)
class Draft:
    """A plan in the making."""

    num_tokens_left: int
    rows: list[ScheduledSequence] = field(default_factory=list)
    swap_out: list[BlockCopy] = field(default_factory=list)
    swap_in: list[BlockCopy] = field(default_factory=list)
    copies: dict[int, list[BlockCopy]] = field(default_factory=dict)  # by the sequence that they are for
    admitted: list[Admitted] = field(default_factory=list)
    num_preempted: int = 0


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
        self._groups: dict[str, SequenceGroup] = {}
        self._sequences: dict[int, tuple[Sequence, SequenceGroup]] = {}
        self._introduced: set[int] = set()  # sequences that a plan has brought to the runner
        self._retired: list[int] = []
        self._num_arrived = 0
        self._num_sequences = 0
        self._step_id = 0
        self._num_idle_plans = 0

    # ---- arriving and leaving ---------------------------------------------------------------------------------------

    def add(self, request: Request) -> SequenceGroup:
        """Queue a request.  That it can fit the pool at all was checked before: see stopping.most_blocks."""
        first = Sequence(self._next_seq_id(), 0, list(request.prompt_token_ids), len(request.prompt_token_ids), seed_of_answer(request.seed, 0))
        group = SequenceGroup(request, self._num_arrived, first)
        self._num_arrived += 1
        self._groups[request.request_id] = group
        self._sequences[first.seq_id] = (first, group)
        insort(self.waiting, group, key=self._order)
        return group

    def finish(self, request_id: str, reason: FinishReason) -> SequenceGroup | None:
        """End a request now, whatever it is doing; None if it is not here any more."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for sequence in group.unfinished:
            self._end_sequence(sequence, reason)
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
        self._step_id += 1
        draft = Draft(self.limits.max_num_batched_tokens)
        self._adopt_forks()
        self._make_room(draft)
        for group in self.running:
            for sequence in group.unfinished:
                if self._num_computable(group, sequence) == 1:
                    self._place(draft, group, sequence, 1)
        oldest = self._place_prefills(draft)
        reserve = 0 if oldest is None else -(-draft.num_tokens_left // 2)
        if not draft.num_preempted:
            self._swap_in(draft, reserve)
        if not draft.num_preempted and not self.swapped:
            self._admit(draft, reserve)
        if oldest is not None:
            self._place(draft, *oldest, draft.num_tokens_left)
        self._num_idle_plans = 0 if draft.rows else self._num_idle_plans + 1
        if self._groups and self._num_idle_plans > MAX_IDLE_PLANS:
            raise InvariantBroken(f"{len(self._groups)} requests are unfinished and none could be scheduled")
        retired, self._retired = tuple(self._retired), []
        return StepPlan(
            step_id=self._step_id,
            swap_out=tuple(draft.swap_out),
            swap_in=tuple(draft.swap_in),
            copies=tuple([copy for copies in draft.copies.values() for copy in copies]),
            admitted=tuple(draft.admitted),
            scheduled=tuple(draft.rows),
            retired_seq_ids=retired,
        )

    def commit(self, plan: StepPlan, verdicts: Mapping[int, Verdict]) -> None:
        """Take over what a successful step computed.  Sequences that were ended meanwhile are passed over, by id."""
        for row in plan.scheduled:
            known = self._sequences.get(row.seq_id)
            if known is None:
                continue
            sequence, group = known
            sequence.num_computed_tokens = row.start + len(row.token_ids)
            self.blocks.publish(sequence, group.request.cache_salt)
            for sample in row.samples[1:]:
                self._fork(group, sequence, sample)
            ended = [seq_id for seq_id in self._sample_ids(row) if self._accept(seq_id, verdicts)]
            if ended and not row.samples:
                group.num_unborn = 0  # ended with its prompt: there is nothing to fork for
            if ended and not group.num_live_sequences:
                self._retire_group(group)

    # ---- parts of schedule ------------------------------------------------------------------------------------------

    def _place(self, draft: Draft, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        """Schedule up to so many of the sequence's uncomputed tokens, as far as the budget goes."""
        start = sequence.num_computed_tokens
        num_tokens = min(num_tokens, draft.num_tokens_left, self._num_computable(group, sequence))
        if num_tokens < 1:
            return
        end = start + num_tokens
        draft.num_tokens_left -= num_tokens
        if sequence.seq_id not in self._introduced:
            self._introduce(draft, group, sequence)
        scored: tuple[int, ...] = ()
        if start < sequence.num_prompt_tokens:
            group.timeline.prefill_chunks.append(num_tokens)
            if group.request.sampling_params.prompt_logprobs is not None:
                scored = tuple(sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)])
        draft.rows.append(
            ScheduledSequence(
                sequence.seq_id,
                tuple(sequence.token_ids[start:end]),
                start,
                self.blocks.table(sequence.seq_id),
                self._samples(group, sequence) if end == sequence.num_tokens else (),
                scored,
            )
        )
        timeline = group.timeline
        if timeline.last_step != self._step_id:
            timeline.last_step = self._step_id
            timeline.num_steps += 1
            if timeline.first_step is None:
                timeline.first_step = self._step_id

    def _num_computable(self, group: SequenceGroup, sequence: Sequence) -> int:
        if sequence.fork_source is not None:
            return 0
        # Others wait for this one's prompt: stop there, so that it can't end before they have taken its blocks over.
        if sequence.num_computed_tokens < sequence.num_prompt_tokens and any(other.fork_source is sequence for other in group.unfinished):
            return sequence.num_prompt_tokens - sequence.num_computed_tokens
        return sequence.num_uncomputed_tokens

    def _samples(self, group: SequenceGroup, sequence: Sequence) -> tuple[Sample, ...]:
        if group.request.max_tokens == 0:
            return ()
        own = Sample(sequence.seq_id, sequence.seed)
        if not group.num_unborn:
            return (own,)
        seed = group.request.seed
        return (own, *(Sample(self._next_seq_id(), seed_of_answer(seed, index)) for index in range(1, group.num_unborn + 1)))

    def _introduce(self, draft: Draft, group: SequenceGroup, sequence: Sequence) -> None:
        """Tell the runner of a sequence at its first appearance; a forked one with the tokens it was born with."""
        self._introduced.add(sequence.seq_id)
        request = group.request
        draft.admitted.append(
            Admitted(
                seq_id=sequence.seq_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                seed=sequence.seed,
                output_token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens : sequence.num_computed_tokens]),
                fault=request.fault,
            )
        )

    def _place_prefills(self, draft: Draft) -> tuple[SequenceGroup, Sequence] | None:
        """Share half of what the decodes left among those who lack more than one token, shortest first.

        The first in line is returned instead: it gets the other half at least, and whatever nobody else takes.  So a
        short prompt passes a long one, and the long one still moves in every step.
        """
        lacking = [(group, one) for group in self.running for one in group.unfinished if self._num_computable(group, one) > 1]
        if not lacking:
            return None
        oldest, *others = lacking
        most_left = -(-draft.num_tokens_left // 2)
        for group, sequence in sorted(others, key=lambda pair: pair[1].num_uncomputed_tokens):
            self._place(draft, group, sequence, draft.num_tokens_left - most_left)
        return oldest

    def _make_room(self, draft: Draft) -> None:
        """Let every running sequence's table cover its tokens; those who must give way for that are preempted."""
        while self.running:
            wanted = [
                (sequence, sequence.num_tokens) for group in self.running for sequence in group.unfinished if sequence.fork_source is None
            ]
            if self.blocks.num_new_blocks(wanted) <= self.blocks.device.num_free and self._cover(draft, wanted):
                return
            priority_of = {group.arrival_order: self._order(group)[0] for group in self.running}
            self._preempt(draft, self._policy.victim(self.running, priority_of) or self.running[0])

    def _cover(self, draft: Draft, wanted: list[tuple[Sequence, int]]) -> bool:
        """Returns whether all could be covered; what was done for some stays done."""
        for sequence, num_tokens in wanted:
            try:
                self._keep_copies(draft, sequence, self.blocks.append(sequence, num_tokens))
            except OutOfBlocks:
                return False
        return True

    def _keep_copies(self, draft: Draft, sequence: Sequence, copies: list[BlockCopy]) -> None:
        if copies:
            draft.copies[sequence.seq_id] = copies
            self.counters.num_copied_blocks += len(copies)

    def _preempt(self, draft: Draft, group: SequenceGroup) -> None:
        draft.num_preempted += 1
        self.running.remove(group)
        # Blocks that a copy of this very step was to fill have no content yet: they can't be swapped out.
        is_incomplete = [draft.copies.pop(sequence.seq_id, None) for sequence in group.unfinished]
        if not any(is_incomplete) and self._policy.swaps(group):
            copies = self.blocks.swap_out(group.unfinished)
            draft.swap_out += copies
            group.timeline.num_swapped_out_blocks += len(copies)
            group.timeline.num_preemptions_swap += 1
            self.counters.num_swapped_out_blocks += len(copies)
            self.counters.num_preempted_swap += 1
            group.move_to(GroupStatus.SWAPPED)
            insort(self.swapped, group, key=self._order)
            return
        for sequence in group.unfinished:
            self.blocks.free(sequence.seq_id)
        group.timeline.num_preemptions_recompute += 1
        self.counters.num_preempted_recompute += 1
        group.move_to(GroupStatus.WAITING)
        insort(self.waiting, group, key=self._order)

    def _swap_in(self, draft: Draft, reserve: int) -> None:
        while self.swapped and draft.num_tokens_left > reserve:
            group = self.swapped[0]
            sequences = group.unfinished
            if not self._has_room(group, self.blocks.num_blocks_to_return(sequences)):
                return
            try:
                copies = self.blocks.swap_in(sequences)
            except OutOfBlocks:
                return
            self.swapped.pop(0)
            draft.swap_in += copies
            group.timeline.num_swapped_in_blocks += len(copies)
            self.counters.num_swapped_in_blocks += len(copies)
            self._run(group)
            if not self._cover(draft, [(sequence, sequence.num_tokens) for sequence in sequences]):
                return  # the next step makes room for it
            for sequence in sequences:
                self._place(draft, group, sequence, draft.num_tokens_left - reserve)

    def _admit(self, draft: Draft, reserve: int) -> None:
        while self.waiting and draft.num_tokens_left > reserve:
            group = self.waiting[0]
            first, *others = group.unfinished
            request = group.request
            # Scores of the prompt need its logits, so nothing of it may be skipped.
            is_scored = request.sampling_params.prompt_logprobs is not None
            # Where others will take the prompt over, its last token must be computed, so that there is a step to do it in.
            token_ids = first.token_ids[: first.num_prompt_tokens] if others else first.token_ids
            prefix = [] if is_scored else self.blocks.cached_prefix(token_ids, request.cache_salt)
            num_shared = first.num_prompt_tokens // self.blocks.block_size
            num_blocks = self.blocks.num_blocks_for(first.num_tokens) - len(prefix) + self.blocks.num_taken(prefix)
            num_blocks += sum(self.blocks.num_blocks_for(other.num_tokens) - num_shared for other in others)
            if not self._has_room(group, num_blocks):
                return
            try:
                self.blocks.allocate(first, first.num_tokens, prefix)
            except OutOfBlocks:
                return
            self.waiting.pop(0)
            self._count_admission(group, first, len(prefix) * self.blocks.block_size, is_scored)
            for other in others:
                other.fork_source, other.num_computed_tokens = first, 0
            self._run(group)
            self._place(draft, group, first, draft.num_tokens_left - reserve)

    def _has_room(self, group: SequenceGroup, num_blocks: int) -> bool:
        """Whether so many blocks can be given without driving out those who run: each of them may need one very soon."""
        num_running = sum(other.num_live_sequences for other in self.running)
        if num_running + group.num_live_sequences > self.limits.max_num_seqs:
            return False
        return self.blocks.device.num_free - num_blocks >= num_running

    def _count_admission(self, group: SequenceGroup, first: Sequence, num_cached_tokens: int, is_scored: bool) -> None:
        if group.timeline.first_step is None:
            group.timeline.num_cached_tokens = num_cached_tokens
            if not is_scored and self.blocks.enable_prefix_caching:
                self.counters.num_prefix_queried_tokens += first.num_tokens
                self.counters.num_prefix_hit_tokens += num_cached_tokens
        else:
            num_lost = max(0, first.num_computed_tokens - num_cached_tokens)
            num_lost += sum(max(0, other.num_computed_tokens - other.num_prompt_tokens) for other in group.unfinished[1:])
            group.timeline.num_recomputed_tokens += num_lost
            self.counters.num_recomputed_tokens += num_lost
        first.num_computed_tokens = num_cached_tokens

    def _adopt_forks(self) -> None:
        """After a recompute: let those who wait for the first sequence's prompt share its blocks, once they are computed."""
        for group in self.running:
            if len(group.sequences) == 1:
                continue
            for sequence in group.unfinished:
                source = sequence.fork_source
                if source is not None and source.num_computed_tokens >= source.num_prompt_tokens:
                    self.blocks.fork(source, sequence, source.num_prompt_tokens)
                    sequence.num_computed_tokens = source.num_prompt_tokens
                    sequence.fork_source = None

    # ---- parts of commit --------------------------------------------------------------------------------------------

    def _sample_ids(self, row: ScheduledSequence) -> tuple[int, ...]:
        return tuple([sample.seq_id for sample in row.samples]) or (row.seq_id,)

    def _fork(self, group: SequenceGroup, parent: Sequence, sample: Sample) -> None:
        """Bear a sequence that shares all of the parent's tokens and blocks so far."""
        child = Sequence(sample.seq_id, len(group.sequences), list(parent.token_ids), parent.num_prompt_tokens, sample.seed)
        child.num_computed_tokens = parent.num_computed_tokens
        self.blocks.fork(parent, child, parent.num_computed_tokens)
        group.sequences.append(child)
        group.num_unborn -= 1
        self._sequences[child.seq_id] = (child, group)

    def _accept(self, seq_id: int, verdicts: Mapping[int, Verdict]) -> bool:
        """Append what the verdict accepts; returns whether the sequence ended by it."""
        verdict = verdicts.get(seq_id)
        if verdict is None:
            return False
        sequence, _ = self._sequences[seq_id]
        sequence.token_ids += verdict.token_ids
        sequence.cumulative_logprob += verdict.cumulative_logprob
        if verdict.finish_reason is None:
            return False
        self._end_sequence(sequence, verdict.finish_reason)
        return True

    def _end_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.blocks.free(sequence.seq_id)
        del self._sequences[sequence.seq_id]
        if sequence.seq_id in self._introduced:
            self._introduced.remove(sequence.seq_id)
            self._retired.append(sequence.seq_id)

    def _retire_group(self, group: SequenceGroup) -> None:
        queue = {GroupStatus.WAITING: self.waiting, GroupStatus.RUNNING: self.running, GroupStatus.SWAPPED: self.swapped}[group.status]
        queue.remove(group)
        group.move_to(GroupStatus.FINISHED)
        del self._groups[group.request.request_id]

    # ---- small things -----------------------------------------------------------------------------------------------

    def _run(self, group: SequenceGroup) -> None:
        group.move_to(GroupStatus.RUNNING)
        insort(self.running, group, key=self._order)

    @property
    def _order(self) -> Callable[[SequenceGroup], tuple[int, int]]:
        return by_priority if self.limits.policy is SchedulingPolicy.PRIORITY else by_arrival

    def _next_seq_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences


def by_arrival(group: SequenceGroup) -> tuple[int, int]:
    return 0, group.arrival_order


def by_priority(group: SequenceGroup) -> tuple[int, int]:
    return group.request.priority, group.arrival_order
