"""best_of: what all answers begin with goes out as it settles; the rest when all are there, the likeliest n, best first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pagestream.engine.core.outputs import CompletionOutput, RequestOutput, fold_answer


class Ranker:
    """Keeps the deltas of all answers until they can be told."""

    def __init__(self, n: int, num_answers: int):
        self._n = n
        self._deltas: dict[int, list[CompletionOutput]] = {index: [] for index in range(num_answers)}
        self._token_ids: dict[int, list[int]] = {index: [] for index in range(num_answers)}
        self._num_common = 0  # tokens
        self._num_told = 0  # deltas of the first answer that were sent as the beginning of all

    def collect(self, output: RequestOutput, likelihood: Mapping[int, float]) -> RequestOutput:
        """The output as it can be told now; `likelihood` is each answer's cumulative logprob."""
        for delta in output.outputs:
            self._deltas[delta.index].append(delta)
            self._token_ids[delta.index] += delta.token_ids
        return replace(output, outputs=tuple(self._best(likelihood) if output.finished else self._settled()))

    def _settled(self) -> list[CompletionOutput]:
        first, *others = self._token_ids.values()
        self._num_common = num_common(first, others, self._num_common)
        start = self._num_told
        num_tokens = sum(len(delta.token_ids) for delta in self._deltas[0][:start])
        # Whole deltas only, whose text belongs to their tokens.
        for delta in self._deltas[0][start:]:
            num_tokens += len(delta.token_ids)
            if num_tokens > self._num_common or delta.finish_reason is not None:
                break
            self._num_told += 1
        if self._num_told == start:
            return []
        settled = fold_answer(self._deltas[0][start : self._num_told])
        return [replace(settled, index=index) for index in range(self._n)]

    def _best(self, likelihood: Mapping[int, float]) -> list[CompletionOutput]:
        told = fold_answer(self._deltas[0][: self._num_told]) if self._num_told else CompletionOutput(0)
        ranked = sorted(self._deltas, key=lambda index: (-likelihood[index], index))[: self._n]
        return [
            replace(self._rest(self._deltas[answer], told), index=index, cumulative_logprob=likelihood[answer])
            for index, answer in enumerate(ranked)
        ]

    def _rest(self, deltas: Sequence[CompletionOutput], told: CompletionOutput) -> CompletionOutput:
        """The whole answer without its beginning that was told."""
        whole = fold_answer(list(deltas))
        num_tokens = len(told.token_ids)
        return replace(
            whole,
            text=whole.text[len(told.text) :],
            token_ids=whole.token_ids[num_tokens:],
            logprobs=None if whole.logprobs is None else whole.logprobs[num_tokens:],
            token_texts=None if whole.token_texts is None else whole.token_texts[num_tokens:],
        )


def num_common(first: Sequence[int], others: Sequence[Sequence[int]], known: int) -> int:
    """How many tokens all begin with, of which the first `known` are known to be common."""
    end = min(len(first), *(len(other) for other in others)) if others else len(first)
    while known < end and all(other[known] == first[known] for other in others):
        known += 1
    return known
