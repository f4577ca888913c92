"""Writes the scheduler's decisions down as a StepPlan."""

from __future__ import annotations

from pagestream.engine.core.block_manager import BlockManager
from pagestream.engine.core.request import Pooling
from pagestream.engine.core.seeds import seed_of_answer
from pagestream.engine.core.sequence import Sequence, SequenceGroup
from pagestream.engine.core.step_plan import Admitted, BlockCopy, Sample, ScheduledSequence, StepPlan


class PlanWriter:
    """One plan at a time: `begin`, any number of decisions, `end`.

    Numbers the steps and the sequences, and knows which sequences the runner has met: each is introduced with its first row
    and retired after its last.
    """

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self._introduced: set[int] = set()
        self._retired: list[int] = []
        self._num_sequences = 0
        self.step_id = 0
        self._clear()

    def begin(self, num_tokens: int) -> None:
        """A plan of at most so many tokens."""
        self._clear()
        self.step_id += 1
        self.num_tokens_left = num_tokens

    def _clear(self) -> None:
        self.num_tokens_left = 0
        self.num_preempted = 0
        self.rows: list[ScheduledSequence] = []
        self.swap_out: list[BlockCopy] = []
        self.swap_in: list[BlockCopy] = []
        self.copies: dict[int, list[BlockCopy]] = {}  # by the sequence that they are for
        self._admitted: list[Admitted] = []

    def next_seq_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences

    def place(self, group: SequenceGroup, sequence: Sequence, num_tokens: int) -> None:
        """A row with so many of the sequence's uncomputed tokens, or as many as the budget still has."""
        num_tokens = min(num_tokens, self.num_tokens_left)
        if num_tokens < 1:
            return
        self.num_tokens_left -= num_tokens
        start = sequence.num_computed_tokens
        end = start + num_tokens
        token_ids = sequence.token_ids
        if sequence.seq_id not in self._introduced:
            self._introduce(group, sequence)
        self.rows.append(
            ScheduledSequence(
                sequence.seq_id,
                tuple(token_ids[start:end]),
                start,
                self._blocks.table(sequence.seq_id),
                self._samples(group, sequence) if end == len(token_ids) else (),
                self._note_prefill(group, sequence, end) if start < sequence.num_prompt_tokens else (),
                0 if group.request.pooling is None else num_pooled(group.request.pooling, num_tokens, end == len(token_ids)),
            )
        )
        timeline = group.timeline
        if timeline.last_step != self.step_id:
            timeline.last_step = self.step_id
            timeline.num_steps += 1
            if timeline.first_step is None:
                timeline.first_step = self.step_id

    def retire(self, seq_id: int) -> None:
        """The sequence is in no later plan."""
        if seq_id in self._introduced:
            self._introduced.remove(seq_id)
            self._retired.append(seq_id)

    def end(self) -> StepPlan:
        retired, self._retired = tuple(self._retired), []
        return StepPlan(
            step_id=self.step_id,
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            copies=tuple([copy for copies in self.copies.values() for copy in copies]),
            admitted=tuple(self._admitted),
            scheduled=tuple(self.rows),
            retired_seq_ids=retired,
        )

    def _note_prefill(self, group: SequenceGroup, sequence: Sequence, end: int) -> tuple[int, ...]:
        """Count the chunk; returns the tokens to be scored in it, if any."""
        start = sequence.num_computed_tokens
        group.timeline.prefill_chunks.append(end - start)
        if group.request.sampling_params.prompt_logprobs is None:
            return ()
        return tuple(sequence.token_ids[start + 1 : min(end + 1, sequence.num_prompt_tokens)])

    def _samples(self, group: SequenceGroup, sequence: Sequence) -> tuple[Sample, ...]:
        """Those that the row's last token is to give: none where nothing is generated, several where others are yet unborn."""
        if group.request.max_tokens == 0:
            return ()
        num_others = group.num_unborn
        if group.has_beams and sequence is group.unfinished[0]:
            num_others = group.request.sampling_params.num_sequences - 1  # all beams of the step may go on from a single one
        elif group.has_beams:
            num_others = 0
        if not num_others:
            return sequence.own_sample
        seed = group.request.seed
        others = [Sample(self.next_seq_id(), seed_of_answer(seed, index)) for index in range(1, num_others + 1)]
        return (*sequence.own_sample, *others)

    def _introduce(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Tell the runner of a sequence at its first appearance; a forked one with the tokens it was born with.

        That is all but the last, wherever its computation stands: one that had to give way before its first row may come back in
        chunks, of which the sampler sees only the one that ends with the last token.
        """
        self._introduced.add(sequence.seq_id)
        request = group.request
        self._admitted.append(
            Admitted(
                seq_id=sequence.seq_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                seed=sequence.seed,
                output_token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens : -1]),
                fault=request.fault,
            )
        )


def num_pooled(pooling: Pooling, num_tokens: int, is_last: bool) -> int:
    """How many tokens of a row, counted from its end, belong to the embedding; `is_last`: it is the prompt's last row."""
    return num_tokens if pooling is Pooling.MEAN else int(is_last)
