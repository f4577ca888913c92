"""The wire types of what completions and chat share, and of completions: what OpenAI's API and vLLM's extensions name.

null means "left out" for every optional field.  What is known but not served stands in the `unsupported` tables and is refused by
name, except for the values listed there, which ask for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from pagestream.engine import Fault, InvalidRequest, SamplingParams
from pagestream.server.constraints import ResponseFormat, StructuredOutputs, find_constraint
from pagestream.server.fields import (
    BadWord,
    Count,
    EarlyStopping,
    Flag,
    ModelRequest,
    Prompts,
    Real,
    Several,
    Stops,
    Text,
    Whole,
    WireModel,
    at_most,
)

GUIDED = {f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")}
UNSUPPORTED_GUIDED: dict[str, tuple[Any, ...]] = dict.fromkeys(GUIDED, ())
MAX_BIASES = 1 << 16


class StreamOptions(WireModel):
    include_usage: Flag | None = Field(False, description="One more chunk before [DONE] has the usage of the whole request.")
    continuous_usage_stats: Flag | None = Field(False, description="Every chunk has the usage so far; needs include_usage.")
    resumable: Flag | None = Field(
        False, description="Events have ids, and GET /v1/streams/{id} with Last-Event-ID goes on where a broken stream ended."
    )
    include_obfuscation: Literal[False] | None = Field(None, description="Padding against traffic analysis is not offered.")

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise InvalidRequest("continuous_usage_stats needs include_usage", param="stream_options.continuous_usage_stats")
        return self


class FaultRequest(WireModel):
    """An error to be injected into this request's own computation; refused unless the server was started for it."""

    kind: Literal["raise", "nan", "hang", "slow", "oom"]
    stage: Literal["forward", "sample", "judge"] = "forward"
    at_token: Count = 0
    seconds: Real = Field(30.0, ge=0, le=3600)


class GenerationRequest(ModelRequest):
    """What completions and chat have in common."""

    max_tokens: Count | None = Field(None, description="Tokens to generate at most.")
    min_tokens: Count | None = Field(0, description="No end of sequence and no stop before so many tokens.")
    temperature: Real | None = Field(1.0, ge=0, le=2, description="0 is greedy.")
    top_p: Real | None = Field(1.0, ge=0, le=1, description="0 is greedy.")
    top_k: Whole | None = Field(0, ge=-1, le=2**31 - 1, description="0 and -1: off.")
    min_p: Real | None = Field(0.0, ge=0, le=1)
    typical_p: Real | None = Field(1.0, gt=0, le=1, description="Keep the most typical tokens up to this probability; 1: off.")
    n: Whole | None = Field(1, ge=1, le=128, description="Answers per prompt.")
    seed: Whole | None = Field(None, description="The same seed gives the same answer, whoever else is served at the time.")
    stop: Stops = ()
    stop_token_ids: list[Count] | None = Field(None, max_length=1024)
    include_stop_str_in_output: Flag | None = False
    ignore_eos: Flag | None = False
    presence_penalty: Real | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: Real | None = Field(0.0, ge=-2, le=2)
    repetition_penalty: Real | None = Field(1.0, gt=0, le=100)
    logit_bias: Annotated[dict[str, Real] | None, at_most(MAX_BIASES)] = Field(
        None, max_length=MAX_BIASES, description="Token ids, written as text, to what is added to their logits: -100 to 100."
    )
    allowed_token_ids: Several[Count] | None = Field(None, min_length=1)
    prompt_logprobs: Whole | None = Field(
        None, ge=0, le=20, description="So many likeliest tokens at each position of the prompt."
    )
    bad_words: list[BadWord] | None = Field(None, max_length=64, description="Words that the answer must not hold.")
    skip_special_tokens: Flag | None = True
    return_token_ids: Flag | None = Field(False, description="Answers have the token ids of the prompt and of what was generated.")
    add_special_tokens: Flag | None = None
    truncate_prompt_tokens: Whole | None = Field(
        None, ge=1, le=2**31 - 1, description="Only the prompt's last so many tokens count."
    )
    priority: Whole | None = Field(0, description="Lower goes first, where the server schedules by priority.")
    cache_salt: Text | None = Field(
        None, min_length=1, max_length=256, description="Only requests with the same salt share cached prefixes."
    )
    include_timeline: Flag | None = Field(False, description="The end of the answer says why it took as long as it did.")
    stream: Flag | None = False
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    timeout_s: Real | None = Field(
        None,
        gt=0,
        le=86400,
        description="Seconds from arrival, queue included; then the answer ends with what there is, finish_reason `length` and "
        "stop_reason `deadline`.  The header X-Request-Timeout says the same; the lesser of the two counts.",
    )
    user: Text | None = Field(None, description="Accepted for compatibility; without effect.")
    x_fault: FaultRequest | None = None
    response_format: ResponseFormat | None = Field(None, description="JSON, of any kind or of a schema.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The language that the answer belongs to.")

    @model_validator(mode="after")
    def check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream", param="stream_options")
        return self

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def wants_resumable(self) -> bool:
        return bool(self.stream_options and self.stream_options.resumable)

    @property
    def adds_special_tokens(self) -> bool:
        default = type(self).model_fields["add_special_tokens"].default
        return bool(default if self.add_special_tokens is None else self.add_special_tokens)

    def fault(self) -> Fault | None:
        asked = self.x_fault
        return None if asked is None else Fault(asked.kind, asked.stage, asked.at_token, asked.seconds)

    def common_params(self) -> dict[str, Any]:
        """The arguments of SamplingParams that both kinds of request share; what is null is left to its default."""
        given = {name: getattr(self, name) for name in SHARED_PARAMS}
        given["constraint"] = find_constraint(self.response_format, self.structured_outputs)
        return {name: value for name, value in given.items() if value is not None}


SHARED_PARAMS = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "prompt_logprobs", "skip_special_tokens", "typical_p", "bad_words",
)  # fmt: skip


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    unsupported = {"suffix": ("",)} | UNSUPPORTED_GUIDED
    elsewhere = GUIDED | {"messages": "/v1/chat/completions", "tools": "/v1/chat/completions", "input": "/v1/responses"}
    model_config = ConfigDict(
        json_schema_extra={"example": {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 16}}
    )

    prompt: Prompts
    max_tokens: Count | None = Field(16, description="Tokens to generate at most; 0 with echo scores the prompt.")
    best_of: Whole | None = Field(None, ge=1, le=128, description="Answers generated, of which the n likeliest are returned.")
    use_beam_search: Flag | None = Field(
        False, description="Search the likeliest answers; needs temperature 0 and a width of at least 2: best_of or n."
    )
    length_penalty: Real | None = Field(
        1.0, ge=-16, le=16, description="Beams: above 0 favours long answers, below 0 short ones."
    )
    early_stopping: EarlyStopping = False
    echo: Flag | None = Field(False, description="The answer begins with the prompt.")
    logprobs: Whole | None = Field(
        None, ge=0, le=20, description="So many likeliest tokens at each position, besides the chosen one."
    )
    add_special_tokens: Flag | None = Field(True, description="Whether the tokenizer may add its begin-of-sequence token.")

    @model_validator(mode="after")
    def check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequest(f"best_of is {self.best_of} and must be at least n, which is {self.n or 1}", param="best_of")
        return self

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequest naming the field."""
        params = self.common_params()
        if self.max_tokens is not None:
            params["max_tokens"] = self.max_tokens
        for name in ("best_of", "use_beam_search", "length_penalty", "early_stopping"):
            if getattr(self, name) is not None:
                params[name] = getattr(self, name)
        if self.logprobs is not None:
            params["logprobs"] = self.logprobs
            if self.echo:
                params["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return SamplingParams(**params)
