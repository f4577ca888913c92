"""From what the caller gives to a Request: tokenized, checked against the model and the pool, with everything resolved."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pagestream.engine.core.config import SchedulingPolicy
from pagestream.engine.core.errors import ContextLengthExceeded, InvalidRequest
from pagestream.engine.core.request import Begun, Fault, Pooling, Request
from pagestream.engine.core.sampling_params import Constraint, SamplingParams
from pagestream.engine.core.seeds import mix
from pagestream.engine.core.stopping import most_blocks, most_tokens
from pagestream.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may take at most."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    policy: SchedulingPolicy
    allows_faults: bool


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request may say besides its prompt and its sampling parameters."""

    priority: int = 0
    cache_salt: str = ""
    fault: Fault | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None  # keep so many of the prompt's last tokens
    include_timeline: bool = False  # the last output says what happened to the request
    timeout_s: float | None = None  # from arrival to the end, wherever the request is then
    begun: Begun | None = None  # by an earlier engine
    pooling: Pooling | None = None  # the prompt's embedding, and nothing generated


class Intake:
    """Thread-safe: prompts are tokenized on helper threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: Limits,
        seed: int | None,
        check_constraint: Callable[[Constraint], None] | None = None,
    ):
        self._check_constraint = check_constraint  # raises InvalidRequest; may take its time
        self.limits = limits
        self.tokenizer = tokenizer
        self._base_seed = seed if seed is not None else int.from_bytes(os.urandom(8), "little")
        self._num_drawn = 0
        self._lock = threading.Lock()

    def make_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        arrival_time_s: float,
        options: RequestOptions | None = None,
        param: str = "prompt",
    ) -> Request:
        """Raises ClientError naming the field; `param` is how the caller calls the prompt."""
        options = options or RequestOptions()
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"sampling_params must be SamplingParams, not {params!r}"[:200], param="sampling_params")
        if options.pooling is not None:
            params = SamplingParams(max_tokens=0)  # nothing is sampled, so nothing may depend on how
        self._check_options(params, options)
        token_ids = self._token_ids(prompt, options, param)
        self._check_vocabulary(token_ids, params, param)
        if params.constraint is not None:
            if self._check_constraint is None:
                raise InvalidRequest(f"{params.constraint.param} can't be enforced by this engine", param=params.constraint.param)
            self._check_constraint(params.constraint)
        if params.bad_words:
            params = replace(params, bad_word_ids=self._word_ids(params.bad_words))
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(token_ids),
            sampling_params=params,
            arrival_time_s=arrival_time_s,
            max_tokens=self._room(len(token_ids), params, param),
            seed=self._seed(params, options.begun),
            prompt=prompt if isinstance(prompt, str) else None,
            priority=options.priority,
            cache_salt=options.cache_salt,
            fault=options.fault,
            include_timeline=options.include_timeline,
            output_token_ids=() if options.begun is None else options.begun.output_token_ids,
            is_over=options.begun is not None and options.begun.is_over,
            deadline_s=None if options.timeout_s is None else arrival_time_s + options.timeout_s,
            pooling=options.pooling,
        )

    def _word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as it begins a text and as it follows a space: mostly different tokens.  Raises InvalidRequest."""
        found = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                token_ids = tuple(self.tokenizer.encode(text, False))
                if not token_ids:
                    raise InvalidRequest(f"bad_words holds {word[:40]!r}, which the tokenizer gives no tokens", param="bad_words")
                found.append(token_ids)
        return tuple(dict.fromkeys(found))

    def _check_options(self, params: SamplingParams, options: RequestOptions) -> None:
        if options.priority and self.limits.policy is SchedulingPolicy.FCFS:
            raise InvalidRequest("priority needs a server started with --scheduling-policy priority", param="priority")
        if options.fault is not None and not self.limits.allows_faults:
            raise InvalidRequest("x_fault needs a server started with --enable-fault-injection", param="x_fault")
        if params.num_sequences > self.limits.max_num_seqs:
            name = "n" if params.best_of is None else "best_of"
            raise InvalidRequest(
                f"{name} is {params.num_sequences}; this engine runs at most {self.limits.max_num_seqs} sequences at once", param=name
            )

    def _token_ids(self, prompt: str | Sequence[int], options: RequestOptions, param: str) -> list[int]:
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt, options.add_special_tokens)
        else:
            if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
                raise InvalidRequest(f"{param} must be a text or a list of token ids, not {prompt!r}"[:200], param=param)
            token_ids = list(prompt)
            if any(type(token_id) is not int for token_id in token_ids):
                raise InvalidRequest(f"{param} must hold whole numbers, the ids of tokens", param=param)
        if not token_ids or prompt == "":
            raise InvalidRequest(f"{param} is empty", param=param)
        if options.truncate_prompt_tokens is not None:
            token_ids = token_ids[-options.truncate_prompt_tokens :]
        return token_ids

    def _check_vocabulary(self, token_ids: list[int], params: SamplingParams, param: str) -> None:
        size = self.limits.vocab_size
        if max(token_ids) >= size or min(token_ids) < 0:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < size)
            raise InvalidRequest(f"{param} holds the token id {str(wrong)[:24]}; ids go from 0 to {size - 1}", param=param)
        highest = params.highest_token_id()
        if highest is not None and highest[1] >= size:
            name, token_id = highest
            raise InvalidRequest(f"{name} names the token {str(token_id)[:24]}; ids go from 0 to {size - 1}", param=name)

    def _room(self, num_prompt_tokens: int, params: SamplingParams, param: str) -> int:
        """The answer's max_tokens, resolved; raises ContextLengthExceeded if it can never fit the model or the pool."""
        limits = self.limits
        room = limits.max_model_len - num_prompt_tokens
        least = 1 if params.max_tokens is None else params.max_tokens
        if least > room:
            raise ContextLengthExceeded(param=param, num_tokens=num_prompt_tokens, max_tokens=least, limit=limits.max_model_len)
        n = params.num_sequences
        largest = most_tokens(num_prompt_tokens, n, limits.block_size, limits.num_blocks)
        if params.max_tokens is None:
            max_tokens = min(room, largest)
            if max_tokens >= 1:
                return max_tokens
        elif most_blocks(num_prompt_tokens, params.max_tokens, n, limits.block_size) <= limits.num_blocks:
            return params.max_tokens
        raise ContextLengthExceeded(
            param=param,
            num_tokens=num_prompt_tokens,
            max_tokens=least,
            limit=limits.num_blocks * limits.block_size,
            limited_by=f"the KV cache has room for max_tokens up to {max(largest, 0)} here ({n} sequences), since all of it",
        )

    def _seed(self, params: SamplingParams, begun: Begun | None) -> int:
        if begun is not None:
            return begun.seed
        return params.seed if params.seed is not None else self._draw_seed()

    def _draw_seed(self) -> int:
        with self._lock:
            self._num_drawn += 1
            return mix(self._base_seed, self._num_drawn)
