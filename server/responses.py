"""The shapes of answers, for the API's description and for tests; answers are written as plain JSON (see answer.py)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Reason = Literal["stop", "length", "tool_calls"]


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(Shape):
    cached_tokens: int


class CompletionTokensDetails(Shape):
    reasoning_tokens: int = Field(description="Of the tokens generated, those before the end of the reasoning, its marks included.")


class UsageShape(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="Of chat.")


class PromptLogprob(Shape):
    logprob: float
    rank: int
    decoded_token: str


class ChoiceShape(Shape):
    index: int
    finish_reason: Reason | None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ChoiceShape):
    text: str
    logprobs: CompletionLogprobs | None


class TimelineShape(Shape):
    """Times are seconds since the request's arrival; null: not yet."""

    queued_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    num_steps: int
    prefill_chunks: list[int]
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_preemptions_recompute: int
    num_preemptions_swap: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int
    num_swapped_bytes: int


class AnswerShape(Shape):
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    timeline: list[TimelineShape | None] | None = None  # one per prompt, at the end, where asked for


class Completion(AnswerShape):
    """A whole answer, and in the same shape each chunk of a streamed one, whose last chunk may have no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageShape | None = None


class ChatTopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Shape):
    content: list[ChatTokenLogprob]


class CalledFunctionShape(Shape):
    name: str | None = None
    arguments: str


class ToolCallShape(Shape):
    """In a stream, id, type and name come once, with the first of a call's deltas."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionShape


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallShape] | None = None


class ChatChoice(ChoiceShape):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(AnswerShape):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageShape


class ChatDelta(Shape):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallShape] | None = None


class ChatChunkChoice(ChoiceShape):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(AnswerShape):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageShape | None = None


class ModelCard(Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Shape):
    object: Literal["list"]
    data: list[ModelCard]


class PromptState(Shape):
    status: Literal["waiting", "running", "swapped", "finished"]
    finish_reason: Literal["stop", "length", "abort", "error", "deadline"] | None
    prompt_tokens: int
    completion_tokens: int
    timeline: TimelineShape


class RequestState(Shape):
    id: str
    object: Literal["request"]
    prompts: list[PromptState]


class ErrorDetail(Shape):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(Shape):
    error: ErrorDetail


class Embedding(Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="With encoding_format base64: of little-endian float32.")


class EmbeddingUsage(Shape):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Shape):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Shape):
    prompt: str


class EndpointParameters(Shape):
    """`fields` are JSON Schemas; `refused` are known fields that are not served, with the values that are taken all the same."""

    fields: dict[str, dict[str, Any]]
    refused: dict[str, dict[str, Any]]
    defs: dict[str, dict[str, Any]] = Field(alias="$defs")


class Parameters(Shape):
    object: Literal["parameters"]
    endpoints: dict[str, EndpointParameters]


class Health(Shape):
    status: str


class Version(Shape):
    version: str
