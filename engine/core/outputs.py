"""What the caller gets: always a delta; `fold` makes the whole of many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from pagestream.engine.core.step_plan import TokenLogprobs


class FinishReason(Enum):
    STOP = "stop"  # end of sequence, stop token or stop string
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; each token is counted once, whatever was recomputed."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """New text and tokens of one of the n answers.

    Text may lag behind the tokens: what could still become a stop string or half a character is held back.
    `logprobs` are the new tokens' own, one each, where asked for; `token_texts` has the text that each of them stands for.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it; None for the model's own end


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A delta of one request's answers.  `finished` comes once, on the last; `error` says why it ended, if by a fault."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...] = ()
    finished: bool = False
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # new ones; the prompt's first token has None
    error: str | None = None


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """One delta that says what both say, in their order.  Used where the reader is slow."""
    answers = {answer.index: answer for answer in first.outputs}
    for new in second.outputs:
        old = answers.get(new.index)
        answers[new.index] = new if old is None else join(old, new)
    scored = (first.prompt_logprobs or ()) + (second.prompt_logprobs or ())
    return replace(second, outputs=tuple(answers[index] for index in sorted(answers)), prompt_logprobs=scored or None)


def join(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = None if old.logprobs is None and new.logprobs is None else (old.logprobs or ()) + (new.logprobs or ())
    return replace(new, text=old.text + new.text, token_ids=old.token_ids + new.token_ids, logprobs=logprobs)


def fold(outputs: Iterable[RequestOutput]) -> RequestOutput:
    """The whole answer of a finished request's deltas, in their order.  Raises ValueError for none at all."""
    parts = list(outputs)
    if not parts:
        raise ValueError("no output to fold")
    answers: dict[int, list[CompletionOutput]] = {}
    for part in parts:
        for new in part.outputs:
            answers.setdefault(new.index, []).append(new)
    scored = tuple(entry for part in parts for entry in part.prompt_logprobs or ())
    return replace(parts[-1], outputs=tuple(fold_answer(answers[index]) for index in sorted(answers)), prompt_logprobs=scored or None)


def fold_answer(deltas: list[CompletionOutput]) -> CompletionOutput:
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs or ()) if has_logprobs else None,
    )
