"""When a sequence ends, apart from stop strings: pure functions, in a stated order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pagestream.engine.core.outputs import FinishReason
from pagestream.engine.core.request import Request


class Verdict(NamedTuple):
    """What becomes of one sequence after a step: the tokens it keeps, and whether that was the end."""

    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    parent_seq_id: int | None = None  # of a beam that is born by this: whom it continues


@dataclass(frozen=True, slots=True)
class TokenStop:
    """A token that ends the sequence.  `stop_token_id` is None for the model's own end of sequence."""

    stop_token_id: int | None


def stop_at(token_id: int, num_output_tokens: int, request: Request, eos_token_ids: frozenset[int]) -> TokenStop | None:
    """Whether this token, the num_output_tokens-th of the answer, ends it: min_tokens first, then eos, then stop tokens."""
    params = request.sampling_params
    if num_output_tokens < params.min_tokens:
        return None
    if token_id in eos_token_ids and not params.ignore_eos:
        return TokenStop(None)
    return TokenStop(token_id) if token_id in params.stop_token_ids else None


def is_full(num_output_tokens: int, request: Request) -> bool:
    """Whether the answer has its last token; asked after every other reason to stop."""
    return num_output_tokens >= request.max_tokens


def most_blocks(num_prompt_tokens: int, max_tokens: int, num_sequences: int, block_size: int) -> int:
    """The blocks that a request holds at most, alone in the pool: full blocks of the prompt are shared, the rest is not.

    The last token of an answer is never computed, so it needs no slot.
    """
    last = max(num_prompt_tokens, num_prompt_tokens + max_tokens - 1)
    num_shared = num_prompt_tokens // block_size if num_sequences > 1 else 0
    return num_shared + num_sequences * (-(-last // block_size) - num_shared)


def most_tokens(num_prompt_tokens: int, num_sequences: int, block_size: int, num_blocks: int) -> int:
    """The largest max_tokens with which `most_blocks` is within the pool; 0 or less if there is none."""
    num_shared = num_prompt_tokens // block_size if num_sequences > 1 else 0
    per_sequence = num_shared + (num_blocks - num_shared) // num_sequences
    room: Sequence[int] = (per_sequence * block_size - num_prompt_tokens + 1, 0)
    return max(room) if per_sequence * block_size >= num_prompt_tokens else 0
