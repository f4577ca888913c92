"""What the caller gets: always a delta; `fold` makes the whole of many.

Nobody changes an output once it is made.  They are not frozen because each row of each step makes some, and making a frozen one
takes twice as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from pagestream.engine.core.step_plan import TokenLogprobs
from pagestream.engine.core.timeline import RequestTimeline

T = TypeVar("T")


class FinishReason(Enum):
    STOP = "stop"  # end of sequence, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"  # its time was over


@dataclass(slots=True)
class Usage:
    """Token counts of one request; each token is counted once, whatever was recomputed."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache


@dataclass(slots=True)
class CompletionOutput:
    """New text and tokens of one of the n answers.

    Text may lag behind the tokens: what could still become a stop string or half a character is held back.
    `logprobs` are the new tokens' own, one each, where asked for; `token_texts` then has the text that each of them gave.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    token_texts: tuple[str, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for the model's own end
    cumulative_logprob: float | None = None  # with the finish_reason, where answers were ranked


@dataclass(slots=True)
class RequestOutput:
    """A delta of one request's answers.  `finished` comes once, on the last; `error` says why it ended, if by a fault."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...] = ()
    finished: bool = False
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # new ones; the prompt's first token has None
    prompt_token_texts: tuple[str, ...] | None = None  # parallel to prompt_logprobs
    error: str | None = None
    timeline: RequestTimeline | None = None  # on the last, where asked for
    embedding: tuple[float, ...] | None = None  # of length 1; on the last, where asked for


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """One delta that says what both say, in their order.  Used where the reader is slow."""
    answers = {answer.index: answer for answer in first.outputs}
    for new in second.outputs:
        old = answers.get(new.index)
        answers[new.index] = new if old is None else join(old, new)
    return replace(
        second,
        outputs=tuple(answers[index] for index in sorted(answers)),
        prompt_logprobs=chain(first.prompt_logprobs, second.prompt_logprobs),
        prompt_token_texts=chain(first.prompt_token_texts, second.prompt_token_texts),
    )


def join(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    return replace(
        new,
        text=old.text + new.text,
        token_ids=old.token_ids + new.token_ids,
        logprobs=chain(old.logprobs, new.logprobs),
        token_texts=chain(old.token_texts, new.token_texts),
    )


def chain(*parts: tuple[T, ...] | None) -> tuple[T, ...] | None:
    """One tuple of all, or None if there was none at all."""
    given = [part for part in parts if part is not None]
    return tuple(entry for part in given for entry in part) if given else None


def fold(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """The whole answer of a finished request's deltas, in their order.  Raises ValueError for none at all."""
    parts = list(outputs)
    if not parts:
        raise ValueError("no output to fold")
    answers: dict[int, list[CompletionOutput]] = {}
    for part in parts:
        for new in part.outputs:
            answers.setdefault(new.index, []).append(new)
    return replace(
        parts[-1],
        outputs=tuple(fold_answer(answers[index]) for index in sorted(answers)),
        prompt_logprobs=chain(*(part.prompt_logprobs for part in parts)),
        prompt_token_texts=chain(*(part.prompt_token_texts for part in parts)),
    )


def fold_answer(deltas: list[CompletionOutput]) -> CompletionOutput:
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=chain(*(delta.logprobs for delta in deltas)),
        token_texts=chain(*(delta.token_texts for delta in deltas)),
    )
