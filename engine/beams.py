"""One request's beam search as the caller sees it: verdicts for the scheduler, text for the stream."""

from __future__ import annotations

from collections.abc import Sequence

from pagestream.engine.core.beam_search import Beam, BeamRules, BeamStep, advance
from pagestream.engine.core.outputs import CompletionOutput, FinishReason
from pagestream.engine.core.request import Request
from pagestream.engine.core.step_plan import ScheduledSequence, StepResult
from pagestream.engine.core.stopping import Verdict
from pagestream.engine.ranking import num_common
from pagestream.engine.text.detokenizer import IncrementalDetokenizer
from pagestream.engine.text.tokenizer import Tokenizer


class BeamAnswers:
    """Tokens that every live beam and every answer so far begin with are settled, and sent as the beginning of all n answers.

    The rest comes at the end, best answer first.
    """

    def __init__(self, request: Request, first_seq_id: int, tokenizer: Tokenizer, eos_token_ids: frozenset[int]):
        self._request = request
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._rules = BeamRules.of(request.sampling_params, request.max_tokens, eos_token_ids)
        self._live: dict[int, Beam] = {first_seq_id: Beam()}  # by seq_id, likeliest first
        self._answers: tuple[Beam, ...] = ()
        self._detokenizer = self._new_detokenizer()
        self._num_settled = 0
        self.is_done = False

    @property
    def seq_ids(self) -> list[int]:
        """Of the beams that live."""
        return list(self._live)

    @property
    def num_output_tokens(self) -> int:
        """Of all answers that are kept, as with best_of; before the end, what is known of each of them."""
        if self.is_done:
            return sum(len(answer.token_ids) for answer in self._answers)
        return self._num_settled * self._rules.width

    def judge(self, rows: Sequence[ScheduledSequence], result: StepResult) -> dict[int, Verdict]:
        """One step of the search; `rows` are those of all live beams."""
        step = advance(
            list(self._live.values()), self._answers, [result.candidates[seq_id] for seq_id in self._live], self._rules
        )
        self._answers = step.answers
        if step.is_done:
            if len(step.answers) < self._request.sampling_params.n:
                raise RuntimeError("the request's parameters leave fewer answers than n")
            self.is_done = True
            return dict.fromkeys(self._live, Verdict((), FinishReason.STOP))
        return self._go_on(step, [sample.seq_id for row in rows for sample in row.samples[1:]])

    def _go_on(self, step: BeamStep, unborn: list[int]) -> dict[int, Verdict]:
        """A parent's likeliest child goes on as that sequence, the others as forks of it; who has no child ends."""
        parents = list(self._live)
        verdicts: dict[int, Verdict] = {}
        live: dict[int, Beam] = {}
        for beam in step.live:
            parent = parents[beam.parent]
            seq_id = unborn.pop(0) if parent in verdicts else parent
            verdicts[seq_id] = Verdict(beam.token_ids[-1:], None, parent if seq_id != parent else None)
            live[seq_id] = beam
        for parent in parents:
            verdicts.setdefault(parent, Verdict((), FinishReason.STOP))
        self._live = live
        return verdicts

    def news(self) -> list[CompletionOutput]:
        """What of the answers is new; once the search is done, all that is left of them."""
        if self.is_done:
            return [self._rest(index, answer) for index, answer in enumerate(self._answers[: self._request.sampling_params.n])]
        first, *others = [*self._live.values(), *self._answers]
        start, self._num_settled = self._num_settled, num_common(
            first.token_ids, [other.token_ids for other in others], self._num_settled
        )
        if self._num_settled == start:
            return []
        pieces = [self._detokenizer.push(token_id) for token_id in first.token_ids[start : self._num_settled]]
        return [self._delta(index, first, start, self._num_settled, pieces) for index in range(self._request.sampling_params.n)]

    def _rest(self, index: int, answer: Beam) -> CompletionOutput:
        params = self._request.sampling_params
        last = answer.token_ids[-1]
        ends = last in self._rules.end_token_ids
        # A stop token of the caller's own is told, and shown if he wants it; the model's end of sequence is neither.
        stop_token_id = last if ends and (params.ignore_eos or last not in self._eos_token_ids) else None
        is_shown = not ends or (stop_token_id is not None and params.include_stop_str_in_output)
        detokenizer = self._new_detokenizer()
        pieces = [detokenizer.push(token_id) for token_id in answer.token_ids[:-1]]
        pieces.append((detokenizer.push(last) if is_shown else "") + detokenizer.flush())
        start = self._num_settled
        delta = self._delta(index, answer, start, len(answer.token_ids), pieces[start:])
        return CompletionOutput(
            index=index,
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            token_texts=delta.token_texts,
            finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
            stop_reason=stop_token_id,
            cumulative_logprob=answer.cumulative_logprob,
        )

    def _delta(self, index: int, beam: Beam, start: int, end: int, pieces: Sequence[str]) -> CompletionOutput:
        has_logprobs = self._rules.num_top_logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(pieces),
            token_ids=beam.token_ids[start:end],
            logprobs=beam.logprobs[start:end] if has_logprobs else None,
            token_texts=tuple(pieces) if has_logprobs else None,
        )

    def _new_detokenizer(self) -> IncrementalDetokenizer:
        request = self._request
        return IncrementalDetokenizer(
            self._tokenizer, request.prompt_token_ids, skip_special_tokens=request.sampling_params.skip_special_tokens
        )
