"""Tokens to text, verdicts and outputs: whether a sequence ends is decided here, once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from pagestream.engine.beams import BeamAnswers
from pagestream.engine.core.outputs import CompletionOutput, FinishReason, RequestOutput, Usage
from pagestream.engine.core.request import Request
from pagestream.engine.core.step_plan import SampledTokens, ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from pagestream.engine.core.stopping import Verdict, is_full, stop_at
from pagestream.engine.pooling import EmbeddingSum
from pagestream.engine.ranking import Ranker
from pagestream.engine.runner.fault_injection import FaultInjector
from pagestream.engine.text.detokenizer import IncrementalDetokenizer
from pagestream.engine.text.stop_strings import StopStrings
from pagestream.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Answer:
    """One of a request's n answers as it grows."""

    __slots__ = ("cumulative_logprob", "detokenizer", "finish_reason", "index", "num_tokens", "stops")

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer):
        params = request.sampling_params
        self.index = index
        self.detokenizer = IncrementalDetokenizer(
            tokenizer, request.prompt_token_ids, skip_special_tokens=params.skip_special_tokens
        )
        self.stops = StopStrings(params.stop, include_in_output=params.include_stop_str_in_output)
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None


class OpenRequest:
    """One unfinished request: its answers, and what of it has been scored and counted."""

    __slots__ = ("answers", "beams", "embedding", "is_ended", "num_cached_tokens", "num_scored", "ranker", "request", "scores")

    def __init__(self, request: Request):
        params = request.sampling_params
        self.request = request
        self.answers: dict[int, Answer] = {}  # by seq_id; none where beams are searched
        self.beams: BeamAnswers | None = None
        self.ranker = Ranker(params.n, params.num_sequences) if params.num_sequences > params.n else None
        self.embedding = None if request.pooling is None else EmbeddingSum()
        self.num_scored = 0  # prompt positions whose logprobs were sent
        self.num_cached_tokens = 0
        self.scores: IncrementalDetokenizer | None = None  # of the prompt's own tokens, where they are scored
        self.is_ended = False  # before all answers were born

    @property
    def is_finished(self) -> bool:
        if self.is_ended:
            return True
        if self.beams is not None:
            return self.beams.is_done
        is_born = len(self.answers) == self.request.sampling_params.num_sequences
        return is_born and all(answer.finish_reason is not None for answer in self.answers.values())

    @property
    def num_output_tokens(self) -> int:
        if self.beams is not None:
            return self.beams.num_output_tokens
        return sum(answer.num_tokens for answer in self.answers.values())


class Delta:
    """What one step adds to one request's output."""

    __slots__ = ("answers", "embedding", "prompt_logprobs", "prompt_token_texts")

    def __init__(self) -> None:
        self.answers: list[CompletionOutput] = []
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self.prompt_token_texts: tuple[str, ...] | None = None
        self.embedding: tuple[float, ...] | None = None


@dataclass(slots=True)
class Judgement:
    """Of one step: verdicts by the sample's seq_id, rows that failed by seq_id with the reason, and what to send."""

    verdicts: dict[int, Verdict] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    outputs: list[RequestOutput] = field(default_factory=list)


class OutputProcessor:
    """Owns the text of every open request.  Called on the engine's thread."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int], injector: FaultInjector | None = None):
        self._injector = injector
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._open: dict[str, OpenRequest] = {}
        self._owners: dict[int, OpenRequest] = {}  # by seq_id

    def add(self, request: Request, seq_id: int) -> list[RequestOutput]:
        """Open a request; returns one delta for each token that it comes with."""
        opened = OpenRequest(request)
        self._open[request.request_id] = opened
        if request.sampling_params.use_beam_search:
            opened.ranker = None  # the search ranks
            opened.beams = BeamAnswers(request, seq_id, self._tokenizer, self._eos_token_ids)
            self._owners[seq_id] = opened
        else:
            self._bear(opened, seq_id)
        outputs = []
        for token_id in request.output_token_ids:
            delta = Delta()
            self._extend(opened, opened.answers[seq_id], SampledTokens((token_id,)), delta)
            outputs.append(self._output(opened, delta))
            if outputs[-1].finished:
                break
        return outputs

    def set_num_cached(self, request_id: str, num_cached_tokens: int) -> None:
        opened = self._open[request_id]
        # Of the prompt: tokens of an answer that goes on may have been found too.
        opened.num_cached_tokens = min(num_cached_tokens, len(opened.request.prompt_token_ids))

    def judge(self, plan: StepPlan, result: StepResult) -> Judgement:
        """Decide on every sequence of the step.  A row that can't be judged fails alone."""
        judgement = Judgement(failed=dict(result.failed))
        deltas: dict[str, Delta] = {}
        beams: dict[str, list[ScheduledSequence]] = {}
        for row in plan.scheduled:
            opened = self._owners.get(row.seq_id)
            if opened is None or row.seq_id in judgement.failed:
                continue
            request_id = opened.request.request_id
            delta = deltas.get(request_id)
            if delta is None:
                delta = deltas[request_id] = Delta()
            try:
                if self._injector is not None:
                    self._injector.strike("judge", (row,))
                judgement.verdicts |= self._judge_row(opened, row, result, delta)
                if opened.beams is not None and row.samples:
                    beams.setdefault(request_id, []).append(row)
            except Exception as error:
                logger.exception("request %s: an answer could not be judged", request_id)
                judgement.failed[row.seq_id] = f"{type(error).__name__}: {error}"
        for request_id, rows in beams.items():
            self._judge_beams(self._open[request_id], rows, result, deltas[request_id], judgement)
        for request_id, delta in deltas.items():
            if delta.answers or delta.prompt_logprobs:
                output = self._output(self._open[request_id], delta)
                if output.outputs or output.prompt_logprobs or output.finished:
                    judgement.outputs.append(output)
        return judgement

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> RequestOutput | None:
        """The last output of a request that was aborted or failed; None if it is not open."""
        opened = self._open.get(request_id)
        if opened is None:
            return None
        opened.is_ended = True
        delta = Delta()
        if opened.request.sampling_params.ranks_answers:
            # None of them was told to have ended, and which are the best nobody will know.
            opened.ranker = None
            delta.answers += [CompletionOutput(index, finish_reason=reason) for index in range(opened.request.sampling_params.n)]
        else:
            unfinished = [answer for answer in opened.answers.values() if answer.finish_reason is None]
            for answer in unfinished:
                # At a deadline the answer is given as far as it is; what was held back belongs to it.
                text = held_back(answer, request_id) if reason is FinishReason.DEADLINE else ""
                delta.answers.append(CompletionOutput(answer.index, text, finish_reason=reason))
            unborn = range(len(opened.answers), opened.request.sampling_params.n)
            delta.answers += [CompletionOutput(index, finish_reason=reason) for index in unborn]
        return replace(self._output(opened, delta), error=error)

    def request(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _judge_row(self, opened: OpenRequest, row: ScheduledSequence, result: StepResult, delta: Delta) -> dict[int, Verdict]:
        if opened.request.sampling_params.prompt_logprobs is not None:
            self._score(opened, row, result.prompt_logprobs.get(row.seq_id, ()), delta)
        if opened.embedding is not None and row.num_pooled:
            opened.embedding.add(row.start, result.pooled[row.seq_id])
        if opened.request.max_tokens == 0:
            if row.start + len(row.token_ids) < len(opened.request.prompt_token_ids):
                return {}
            delta.embedding = None if opened.embedding is None else opened.embedding.direction()
            self._end_without_tokens(opened, delta)
            return {row.seq_id: Verdict((), FinishReason.LENGTH)}
        if opened.beams is not None:
            return {}  # judged when all of them are there
        verdicts = {}
        for sample in row.samples:
            if sample.seq_id not in opened.answers:
                self._bear(opened, sample.seq_id)
            verdicts[sample.seq_id] = self._extend(opened, opened.answers[sample.seq_id], result.sampled[sample.seq_id], delta)
        return verdicts

    def _judge_beams(
        self, opened: OpenRequest, rows: list[ScheduledSequence], result: StepResult, delta: Delta, judgement: Judgement
    ) -> None:
        """One step of a beam search, unless one of its rows failed: then the request ends with that."""
        beams = opened.beams
        assert beams is not None
        if any(row.seq_id in judgement.failed for row in rows) or len(rows) < len(beams.seq_ids):
            return
        try:
            verdicts = beams.judge(rows, result)
            delta.answers += beams.news()
        except Exception as error:
            logger.exception("request %s: its beams could not be judged", opened.request.request_id)
            judgement.failed[rows[0].seq_id] = f"{type(error).__name__}: {error}"
            return
        judgement.verdicts |= verdicts
        for row in rows:
            self._owners.pop(row.seq_id, None)
        self._owners.update(dict.fromkeys(beams.seq_ids, opened))

    def _bear(self, opened: OpenRequest, seq_id: int) -> None:
        opened.answers[seq_id] = Answer(len(opened.answers), opened.request, self._tokenizer)
        self._owners[seq_id] = opened

    def _extend(self, opened: OpenRequest, answer: Answer, sampled: SampledTokens, delta: Delta) -> Verdict:
        """Take tokens over one by one until one of them ends the answer; the rest is surplus."""
        request = opened.request
        params = request.sampling_params
        pieces: list[str] = []  # what each token gave, before stop strings hold any of it back
        text = ""
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        for token_id in sampled.token_ids:
            answer.num_tokens += 1
            ended = stop_at(token_id, answer.num_tokens, request, self._eos_token_ids)
            is_shown = ended is None or (ended.stop_token_id is not None and params.include_stop_str_in_output)
            piece = answer.detokenizer.push(token_id) if is_shown else ""
            is_last = ended is not None or is_full(answer.num_tokens, request)
            if is_last:
                piece += answer.detokenizer.flush()
            pieces.append(piece)
            text += self._hold_back(answer, piece, request, is_last)
            if answer.stops.matched is not None:
                finish, stop_reason = FinishReason.STOP, answer.stops.matched
            elif ended is not None:
                finish, stop_reason = FinishReason.STOP, ended.stop_token_id
            elif is_last:
                finish = FinishReason.LENGTH
            if finish is not None:
                break
        kept = len(pieces)
        answer.finish_reason = finish
        answer.cumulative_logprob += sampled.cumulative_logprob
        delta.answers.append(
            CompletionOutput(
                index=answer.index,
                text=text,
                token_ids=sampled.token_ids[:kept],
                logprobs=sampled.logprobs[:kept] if sampled.logprobs is not None else None,
                token_texts=tuple(pieces) if sampled.logprobs is not None else None,
                finish_reason=finish,
                stop_reason=stop_reason,
            )
        )
        return Verdict(sampled.token_ids[:kept], finish)

    def _hold_back(self, answer: Answer, piece: str, request: Request, is_last: bool) -> str:
        """What of the new text can be sent; the answer's stop strings know whether it completed one of them."""
        if answer.num_tokens < request.sampling_params.min_tokens:
            return piece  # too early for any stop to count
        text = answer.stops.push(piece)
        return text + answer.stops.flush() if is_last and answer.stops.matched is None else text

    def _end_without_tokens(self, opened: OpenRequest, delta: Delta) -> None:
        opened.ranker = None
        for index in range(opened.request.sampling_params.n):
            delta.answers.append(CompletionOutput(index, finish_reason=FinishReason.LENGTH))
        opened.is_ended = True

    def _score(self, opened: OpenRequest, row: ScheduledSequence, scored: tuple[TokenLogprobs, ...], delta: Delta) -> None:
        """Logprobs of the prompt's tokens; positions that were sent before a recompute are not sent again."""
        prompt = opened.request.prompt_token_ids
        if opened.scores is None:
            opened.scores = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        entries: list[TokenLogprobs | None] = []
        if opened.num_scored == 0 and row.start == 0:
            entries.append(None)
        first_position = row.start + 1
        entries += scored[max(0, opened.num_scored + len(entries) - first_position) :]
        if not entries:
            return
        token_ids = prompt[opened.num_scored : opened.num_scored + len(entries)]
        texts = [opened.scores.push(token_id) for token_id in token_ids]
        opened.num_scored += len(entries)
        if opened.num_scored == len(prompt):
            texts[-1] += opened.scores.flush()
        delta.prompt_logprobs, delta.prompt_token_texts = tuple(entries), tuple(texts)

    def _output(self, opened: OpenRequest, delta: Delta) -> RequestOutput:
        request = opened.request
        output = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple(delta.answers),
            finished=opened.is_finished,
            usage=Usage(len(request.prompt_token_ids), opened.num_output_tokens, opened.num_cached_tokens),
            prompt_logprobs=delta.prompt_logprobs,
            prompt_token_texts=delta.prompt_token_texts,
            embedding=delta.embedding,
        )
        if output.finished:
            del self._open[request.request_id]
            for seq_id in opened.answers if opened.beams is None else opened.beams.seq_ids:
                self._owners.pop(seq_id, None)
        if opened.ranker is None:
            return output
        return opened.ranker.collect(output, {answer.index: answer.cumulative_logprob for answer in opened.answers.values()})


def held_back(answer: Answer, request_id: str) -> str:
    """The end of a text that nothing can complete any more; nothing where that fails, since the request ends anyway."""
    try:
        return answer.stops.push(answer.detokenizer.flush()) + answer.stops.flush()
    except Exception:
        logger.exception("request %s: the end of its text could not be had", request_id)
        return ""
