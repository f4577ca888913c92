"""The offline door: prompts in, whole answers out, in the order of the prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from pagestream.engine.core.errors import EngineFault, InvalidRequest
from pagestream.engine.core.outputs import RequestOutput, fold
from pagestream.engine.core.request import Pooling
from pagestream.engine.core.sampling_params import SamplingParams
from pagestream.engine.engine_args import EngineArgs
from pagestream.engine.factory import build_engine
from pagestream.engine.intake import RequestOptions
from pagestream.engine.interrupts import HeldInterrupts, held_interrupts
from pagestream.engine.llm_engine import LLMEngine


class LLM:
    """A model in this process.  Arguments as vLLM's LLM has them; one that is not supported raises StartError naming it."""

    def __init__(
        self,
        model: str = "smollm2",
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float | None = None,
        enforce_eager: bool = False,
        max_context_len_to_capture: int = 8192,
        disable_custom_all_reduce: bool = False,
        **engine_options: Any,
    ):
        args = EngineArgs.from_options({
            "model": model,
            "tokenizer": tokenizer,
            "tokenizer_mode": tokenizer_mode,
            "trust_remote_code": trust_remote_code,
            "tensor_parallel_size": tensor_parallel_size,
            "dtype": dtype,
            "quantization": quantization,
            "revision": revision,
            "tokenizer_revision": tokenizer_revision,
            "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
            "swap_space": swap_space,
            "enforce_eager": enforce_eager,
            "max_context_len_to_capture": max_context_len_to_capture,
            "disable_custom_all_reduce": disable_custom_all_reduce,
            **engine_options,
        })
        built = build_engine(args.to_config())
        self.llm_engine: LLMEngine = built.engine
        self._chat_template = built.chat_template
        self._num_requests = 0

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        multi_modal_data: None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs come in the order of the prompts.

        Prompts are texts or, through `prompt_token_ids`, token ids (which go before the texts where both are given).
        One SamplingParams for all, or one each.  Raises ValueError for no prompts at all, lists of different lengths, and
        arguments that are not supported; nothing is generated then.  Raises EngineFault if a prompt's computation fails.
        Ctrl-C ends it after the step in progress, and leaves nothing behind.
        """
        for name, value in (("lora_request", lora_request), ("multi_modal_data", multi_modal_data)):
            if value is not None:
                raise InvalidRequest(f"{name} is not supported", param=name)
        texts = [prompts] if isinstance(prompts, str) else None if prompts is None else list(prompts)
        if texts is None and prompt_token_ids is None:
            raise ValueError("either prompts or prompt_token_ids must be given")
        if texts is not None and prompt_token_ids is not None and len(texts) != len(prompt_token_ids):
            raise ValueError(f"{len(texts)} prompts and {len(prompt_token_ids)} lists of prompt_token_ids were given")
        asked: Sequence[str | Sequence[int]] = prompt_token_ids if prompt_token_ids is not None else texts or []
        return self._generate(asked, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of messages with a `role` and a `content` that is text.

        The model's chat template makes each a prompt; the rest is as in `generate`.  Raises InvalidRequest where the model has
        none, or its template refuses a conversation.
        """
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = []
        for conversation in conversations:
            check_messages(conversation)
            prompts.append(self._chat_template.render(
                conversation, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs,
            ))  # fmt: skip
        # The template has written the special tokens.
        return self._generate(prompts, sampling_params, use_tqdm, RequestOptions(add_special_tokens=False))

    def embed(
        self, prompts: str | Sequence[str] | Sequence[Sequence[int]], *, pooling: str = "mean", use_tqdm: bool = True
    ) -> list[tuple[float, ...]]:
        """The direction of the model's hidden states, after its last norm, for each prompt: vectors of length 1.

        `pooling` is "mean", of all tokens' states, or "last", the last token's alone.  Raises ValueError for any other.
        """
        asked: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        options = RequestOptions(pooling=Pooling(pooling))
        with held_interrupts() as held:
            request_ids = self._add_all(asked, [SamplingParams()] * len(asked), held, options)
            return [output.embedding or () for output in self._run(request_ids, held, use_tqdm)]

    def get_tokenizer(self) -> Any:
        return self.llm_engine.intake.tokenizer

    def _generate(
        self,
        asked: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        options: RequestOptions | None = None,
    ) -> list[RequestOutput]:
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params or SamplingParams()] * len(asked)
        if len(params) != len(asked):
            raise ValueError(f"{len(asked)} prompts and {len(params)} sampling_params were given")
        with held_interrupts() as held:
            return self._run(self._add_all(asked, params, held, options), held, use_tqdm)

    def _add_all(
        self,
        asked: Sequence[str | Sequence[int]],
        params: Sequence[SamplingParams],
        held: HeldInterrupts,
        options: RequestOptions | None = None,
    ) -> list[str]:
        request_ids: list[str] = []
        try:
            for prompt, one in zip(asked, params, strict=True):
                request_ids.append(str(self._num_requests))
                self._num_requests += 1
                self.llm_engine.add_request(request_ids[-1], prompt, one, options=options)
                held.let_through()
        except BaseException:  # KeyboardInterrupt too: who goes on in a notebook must not find them still waiting
            self.llm_engine.abort_request(request_ids)
            raise
        return request_ids

    def _run(self, request_ids: Sequence[str], held: HeldInterrupts, use_tqdm: bool) -> list[RequestOutput]:
        deltas: dict[str, list[RequestOutput]] = {request_id: [] for request_id in request_ids}
        try:
            with tqdm(total=len(request_ids), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as progress:
                for output in self._outputs(held):
                    deltas[output.request_id].append(output)
                    progress.update(output.finished)
                    if output.error is not None:
                        raise EngineFault(f"prompt {request_ids.index(output.request_id)}: {output.error}")
        finally:
            self.llm_engine.abort_request(list(request_ids))  # those that are left, if the loop was left early
        return [fold(deltas[request_id]) for request_id in request_ids]

    def _outputs(self, held: HeldInterrupts) -> Iterator[RequestOutput]:
        """Step after step, until nothing is left to compute, or an interrupt has waited for the end of one."""
        while self.llm_engine.has_unfinished_requests():
            yield from self.llm_engine.step()
            held.let_through()


def check_messages(conversation: object) -> None:
    """Raises InvalidRequest for what a template would write into a prompt all the same."""
    if not isinstance(conversation, Sequence) or isinstance(conversation, str):
        raise InvalidRequest("messages must be a list of messages, or of such lists", param="messages")
    for message in conversation:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(name), str) for name in ("role", "content")):
            raise InvalidRequest(f"a message must have a role and a content, both text, not {message!r:.200}", param="messages")
