"""From the logits of a step's rows to their tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagestream.engine.core.errors import InvariantBroken
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.core.step_plan import Admitted, Candidate, SampledTokens, ScheduledSequence
from pagestream.engine.sampling.bad_words import BadWords
from pagestream.engine.sampling.beam_candidates import beam_candidates
from pagestream.engine.sampling.changes import ListedProcessor, StepChanges
from pagestream.engine.sampling.choosing import Choice, Chooser, HostChooser, ScoredRow
from pagestream.engine.sampling.drawing import select
from pagestream.engine.sampling.logits_processors import AllowedTokens, LogitBias, LogitsProcessor, MinTokens
from pagestream.engine.sampling.penalties import Penalties
from pagestream.engine.sampling.typical import TypicalTokens

logger = logging.getLogger(__name__)

NOBODY = -2  # in place of a row's sequence that a processor is not to look at; nobody is called so


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one step's sampling gave: a row is in `failed`, or each of its samples in `sampled`, or, a beam's, in `candidates`."""

    sampled: dict[int, SampledTokens] = field(default_factory=dict)  # by the sample's seq_id
    candidates: dict[int, tuple[Candidate, ...]] = field(default_factory=dict)  # by the row's seq_id
    failed: dict[int, str] = field(default_factory=dict)  # by the row's seq_id

    @classmethod
    def of_plain_rows(cls, choice: Choice) -> Drawn:
        """What was chosen where nothing but tokens is wanted."""
        sampled = {seq_id: SampledTokens((token_id,)) for (_, seq_id), token_id in choice.token_ids.items()}
        return cls(sampled, failed=choice.failed)


@dataclass(slots=True)
class SamplingState:
    params: SamplingParams
    num_known: int  # tokens that the processors have seen: prompt and output up to here
    processors: list[LogitsProcessor] = field(default_factory=list)  # those that the sequence concerns
    is_listed: bool = False  # the chooser applies all that they do
    fault: str | None = None  # a processor failed on this sequence, so what the processors know of it can't be relied on


class Sampler:
    """Invariant: a row's tokens and logprobs depend, to the bit, on its own logits, tokens, parameters and seed alone.

    Pipeline: bias, penalties, then what rules tokens out (min_tokens, allowed_token_ids, bad words, further processors, typical_p), so that nothing
    can bring a ruled out token back; then temperature and truncation, see drawing.py.  Every call can be repeated.
    """

    def __init__(
        self, eos_token_ids: frozenset[int], processors: Sequence[LogitsProcessor] = (), chooser: Chooser | None = None
    ):
        """chooser: None is the host's."""
        self._chooser = chooser or HostChooser()
        self._processors: tuple[LogitsProcessor, ...] = (
            LogitBias(),
            Penalties(),
            MinTokens(eos_token_ids),
            AllowedTokens(),
            BadWords(),
            *processors,
            TypicalTokens(),
        )
        self._eos_token_ids = eos_token_ids
        self._states: dict[int, SamplingState] = {}

    def admit(self, admitted: Admitted) -> None:
        """Meet a sequence; nothing happens if it is known already."""
        if admitted.seq_id in self._states:
            return
        num_known = len(admitted.prompt_token_ids) + len(admitted.output_token_ids)
        state = self._states[admitted.seq_id] = SamplingState(admitted.sampling_params, num_known)
        try:
            for processor in self._processors:
                processor.admit(admitted)
                if processor.concerns(admitted.seq_id):
                    state.processors.append(processor)
            is_single = not admitted.sampling_params.use_beam_search
            state.is_listed = self._chooser.applies_changes and is_single and all(isinstance(one, ListedProcessor) for one in state.processors)
        except Exception as error:
            note_fault(state, admitted.seq_id, error)

    def observe(self, seq_id: int, token_ids: Sequence[int], start: int) -> None:
        """Tokens of the sequence from position `start` on; those that are known already are passed over."""
        state = self._states[seq_id]
        if start > state.num_known:
            raise InvariantBroken(f"sequence {seq_id} was seen up to token {state.num_known}, and now goes on at {start}")
        new = token_ids[state.num_known - start :]
        if new:
            state.num_known += len(new)
            try:
                for processor in state.processors:
                    processor.observe(seq_id, new)
            except Exception as error:
                note_fault(state, seq_id, error)

    def params(self, seq_id: int) -> SamplingParams:
        return self._states[seq_id].params

    def retire(self, seq_id: int) -> None:
        """Forget a sequence; nothing happens if it is unknown."""
        if self._states.pop(seq_id, None) is not None:
            for processor in self._processors:
                processor.retire(seq_id)

    def observe_rows(self, rows: Sequence[ScheduledSequence]) -> list[SamplingParams]:
        """Observe the rows' tokens; returns the parameters of each."""
        for row in rows:
            self.observe(row.seq_id, row.token_ids, row.start)
        return [self._states[row.seq_id].params for row in rows]

    def are_unchanged(self, rows: Sequence[ScheduledSequence]) -> bool:
        """Whether the rows, once observed, need nothing but one draw each from the model's own logits, and perhaps its logprob."""
        return all(len(row.samples) == 1 and self._is_unchanged(row.seq_id) for row in rows)

    def are_greedy(self, rows: Sequence[ScheduledSequence]) -> bool:
        """Whether the rows, once observed, need nothing but the first of the model's own logits."""
        params = [self._states[row.seq_id].params for row in rows]
        return all(one.is_greedy and not wants_logprobs(one) for one in params) and self.are_unchanged(rows)

    def _is_unchanged(self, seq_id: int) -> bool:
        state = self._states[seq_id]
        if state.fault is not None or state.params.use_beam_search:
            return False
        return not any(processor.concerns(seq_id) for processor in state.processors)

    def sample(self, logits: Tensor, rows: Sequence[ScheduledSequence]) -> Drawn:
        """Draw every sample of every row; observes the rows' tokens first.

        logits [R, V] float32, contiguous, one row per scheduled sequence; they are changed.  A row whose logits are not finite
        numbers, whose parameters leave no token, or on whose tokens a processor has failed, fails alone.
        """
        if not rows:
            return Drawn()
        params = self.observe_rows(rows)
        # How a row is changed depends on its own request alone, for the two ways may differ in the last bit.
        is_listed = [self._states[row.seq_id].is_listed for row in rows]
        choose = self._chooser.begin(logits, scored_rows(params), will_change=not all(is_listed))
        beams = [index for index, one in enumerate(params) if one.use_beam_search]
        beam_logprobs = torch.log_softmax(select(logits, beams), dim=-1) if beams else None
        are_changed = False
        if not all(is_listed):
            seq_ids = [NOBODY if listed else row.seq_id for row, listed in zip(rows, is_listed, strict=True)]
            did_change = [processor.apply(logits, seq_ids) for processor in self._processors]
            are_changed = any(did_change)
        beam_scores = select(logits, beams) if beams else None  # a copy where there are other rows, whose choice may change them
        choice = choose(logits, rows, params, self._changes(rows, is_listed), are_changed=are_changed)
        drawn = self.drawn(rows, params, choice)
        if beam_logprobs is not None and beam_scores is not None:
            fine = [place for place, index in enumerate(beams) if rows[index].seq_id not in drawn.failed]
            if fine:
                fine_params = [params[beams[place]] for place in fine]
                found = beam_candidates(select(beam_logprobs, fine), select(beam_scores, fine), fine_params, self._eos_token_ids)
                drawn.candidates.update(zip([rows[beams[place]].seq_id for place in fine], found, strict=True))
        return drawn

    def _changes(self, rows: Sequence[ScheduledSequence], is_listed: Sequence[bool]) -> StepChanges:
        changes = StepChanges()
        seq_ids = [
            row.seq_id if listed and self._states[row.seq_id].processors else NOBODY
            for row, listed in zip(rows, is_listed, strict=True)
        ]  # fmt: skip
        if any(seq_id != NOBODY for seq_id in seq_ids):
            for processor in self._processors:
                if isinstance(processor, ListedProcessor):
                    processor.list_changes(seq_ids, changes)
        return changes

    def drawn(self, rows: Sequence[ScheduledSequence], params: Sequence[SamplingParams], choice: Choice) -> Drawn:
        """What was chosen for the rows, but for those on which a processor has failed."""
        faults = {row.seq_id: fault for row in rows if (fault := self._states[row.seq_id].fault) is not None}
        drawn = Drawn(failed=choice.failed | faults)
        for (row, seq_id), token_id in choice.token_ids.items():
            if rows[row].seq_id in faults:
                continue
            entry = choice.scores.get((row, seq_id))
            if entry is None:
                drawn.sampled[seq_id] = SampledTokens((token_id,))
                continue
            shown = None if params[row].logprobs is None else (entry,)
            drawn.sampled[seq_id] = SampledTokens((token_id,), shown, entry.logprob if params[row].ranks_answers else 0.0)
        return drawn


def note_fault(state: SamplingState, seq_id: int, error: Exception) -> None:
    """Nothing is raised: a processor's step can't be repeated, and only this sequence is to fail, when its next token is drawn."""
    logger.error("a logits processor failed on sequence %d", seq_id, exc_info=error)
    state.fault = f"{type(error).__name__}: {error}"


def wants_logprobs(params: SamplingParams) -> bool:
    """To be shown, or to rank the answers by.  Beams have theirs from their candidates."""
    return not params.use_beam_search and (params.logprobs is not None or params.ranks_answers)


def scored_rows(params: Sequence[SamplingParams]) -> list[ScoredRow]:
    return [ScoredRow(index, one.logprobs or 0) for index, one in enumerate(params) if wants_logprobs(one)]
