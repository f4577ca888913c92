"""What the user asked; never changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pagestream.engine.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Fault:
    """An error to be injected into one request's own computation, for tests; see `--enable-fault-injection`."""

    kind: str  # raise | nan | hang | slow | oom
    stage: str = "forward"  # forward | sample | judge
    at_token: int = 0  # when so many tokens have been generated
    seconds: float = 30.0  # of hang and slow


class Pooling(Enum):
    """Which of a prompt's hidden states its embedding is made of."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Begun:
    """What an earlier engine has made of a request: with this, it goes on to the same tokens."""

    seed: int
    output_token_ids: tuple[int, ...] = ()  # of its only answer; none where logprobs must be told, which takes computing them
    is_over: bool = False  # its deadline ended it, with these tokens


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str  # unique inside the engine
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    arrival_time_s: float  # of the monotonic clock
    max_tokens: int  # sampling_params.max_tokens, or what the context leaves
    seed: int  # sampling_params.seed, or one drawn at arrival
    prompt: str | None = None  # as text, where it came as text
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # only requests with the same salt share cached blocks
    fault: Fault | None = None
    include_timeline: bool = False  # on the last output
    output_token_ids: tuple[int, ...] = ()  # generated already, by an earlier engine
    is_over: bool = False  # its deadline had passed then, so these are all
    deadline_s: float | None = None  # of the monotonic clock: when it ends with what there is
    pooling: Pooling | None = None  # an embedding is asked for; max_tokens is 0 then

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether something is wanted of every position of the prompt, so that none may be taken from the prefix cache."""
        return self.sampling_params.prompt_logprobs is not None or self.pooling is Pooling.MEAN
