"""Scored tokens in the two shapes that OpenAI's API has for them, and in vLLM's shape for those of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagestream.engine import TokenLogprobs

# JSON has no -Infinity; a token that the sampler ruled out has it.
FLOOR = -9999.0


class Vocabulary(Protocol):
    """The engine's tokenizer, as far as it is needed here."""

    def token_text(self, token_id: int) -> str: ...  # a name; tokens that are parts of characters have one too
    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """The text that a token added, where that begins in the answer, and the token's scores; a prompt's first has none."""

    text: str
    text_offset: int
    scores: TokenLogprobs | None


def finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def completion_logprobs(tokens: Sequence[ScoredToken], num_top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Four parallel lists.  The chosen token is always in its list of the likeliest, which then has one entry more."""
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [None if token.scores is None else finite(token.scores.logprob) for token in tokens],
        "top_logprobs": [
            None if token.scores is None else top_by_text(token.text, token.scores, num_top, vocabulary) for token in tokens
        ],
        "text_offset": [token.text_offset for token in tokens],
    }


def top_by_text(chosen: str, scores: TokenLogprobs, num_top: int, vocabulary: Vocabulary) -> dict[str, float]:
    found = {chosen: finite(scores.logprob)}
    for token_id, logprob in scores.top[:num_top]:
        if token_id != scores.token_id:
            text = vocabulary.token_text(token_id)
            # Different tokens may read the same (parts of one character do), and none may hide another.
            found[text if text not in found else f"token_id:{token_id}"] = finite(logprob)
    return found


def chat_logprobs(tokens: Sequence[ScoredToken], num_top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    content = []
    for scores in (token.scores for token in tokens if token.scores is not None):
        top = [chat_entry(token_id, logprob, vocabulary) for token_id, logprob in scores.top[:num_top]]
        content.append({**chat_entry(scores.token_id, scores.logprob, vocabulary), "top_logprobs": top})
    return {"content": content}


def chat_entry(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {"token": vocabulary.token_text(token_id), "logprob": finite(logprob), "bytes": list(vocabulary.token_bytes(token_id))}


def prompt_logprobs(scored: Sequence[TokenLogprobs | None], num_top: int, vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """One entry per token of the prompt: token id, as text, to its logprob and rank."""
    return [None if scores is None else by_id(scores, num_top, vocabulary) for scores in scored]


def by_id(scores: TokenLogprobs, num_top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    ranked = [(scores.token_id, scores.logprob, scores.rank)]
    ranked += [
        (token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(scores.top[:num_top], 1)
        if token_id != scores.token_id
    ]
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": vocabulary.token_text(token_id)}
        for token_id, logprob, rank in ranked
    }
