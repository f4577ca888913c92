"""The offline door: order, shapes, defaults, and refusals that name what is wrong."""

import signal
import sys
from itertools import count

import pytest

from pagestream.engine import LLM, EngineFault, Fault, FinishReason, InvalidRequest, SamplingParams, StartError
from pagestream.engine.factory import Sizes
from pagestream.engine.intake import RequestOptions
from pagestream.engine.interrupts import HeldInterrupts, held_interrupts

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_llama):
    return LLM(model=str(tiny_llama), num_kv_blocks=64, enable_fault_injection=True)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["the quick", "a much longer prompt than the others, for it to take longer", "fox"]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt for output in together] == prompts
    assert [output.outputs[0].text for output in together] == [
        llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].text for prompt in prompts
    ]
    assert all(output.finished and output.outputs[0].finish_reason is FinishReason.LENGTH for output in together)
    assert all(len(output.outputs[0].token_ids) == 6 for output in together)


def test_one_string_is_one_prompt(llm):
    assert len(llm.generate("the quick", GREEDY, use_tqdm=False)) == 1


def test_token_ids_are_the_same_as_their_text(llm):
    (by_text,) = llm.generate("the quick brown", GREEDY, use_tqdm=False)
    (by_ids,) = llm.generate(prompt_token_ids=[list(by_text.prompt_token_ids)], sampling_params=GREEDY, use_tqdm=False)
    assert by_ids.outputs == by_text.outputs
    assert by_ids.prompt is None


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (2, 5)]
    outputs = llm.generate(["the", "the"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [2, 5]


def test_a_conversation_is_the_prompt_that_the_template_makes_of_it(llm):
    first = [{"role": "user", "content": "the quick"}]
    second = [{"role": "system", "content": "fox"}, *first]
    template = llm._chat_template
    answers = llm.chat([first, second], GREEDY, use_tqdm=False)
    assert [answer.prompt for answer in answers] == [template.render(first), template.render(second)]
    tokenizer = llm.get_tokenizer()
    by_ids = llm.generate(
        prompt_token_ids=[tokenizer.encode(template.render(each), False) for each in (first, second)], sampling_params=GREEDY,
        use_tqdm=False,
    )  # fmt: skip
    assert [answer.outputs for answer in answers] == [answer.outputs for answer in by_ids]
    assert llm.chat(first, GREEDY, use_tqdm=False)[0].outputs == answers[0].outputs
    begun = [*first, {"role": "assistant", "content": "brown"}]
    (goes_on,) = llm.chat(begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert goes_on.prompt.endswith("brown")


@pytest.mark.parametrize(
    "messages",
    ["hello", ["hello"], [[]], [{"role": "user"}], [{"role": "user", "content": 5}], [[{"role": "user", "content": "a"}], "b"]],
)
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(InvalidRequest, match="message"):
        llm.chat(messages, GREEDY, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_default_parameters_are_taken_where_none_are_given(llm):
    (output,) = llm.generate("the", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= SamplingParams().max_tokens


def test_seeds(llm):
    def texts(seed):
        params = SamplingParams(n=3, seed=seed, max_tokens=8, ignore_eos=True)
        return [answer.token_ids for answer in llm.generate("the", params, use_tqdm=False)[0].outputs]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert texts(None) != texts(None)
    assert len(set(texts(1))) == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "prompts"),
        ({"prompts": ["a", "b"], "prompt_token_ids": [[1]]}, "2 prompts"),
        ({"prompts": ["a", "b"], "sampling_params": [GREEDY]}, "sampling_params"),
        ({"prompts": "a", "lora_request": object()}, "lora_request"),
        ({"prompts": "a", "multi_modal_data": {}}, "multi_modal_data"),
        ({"prompts": ""}, "prompt"),
        ({"prompt_token_ids": [[]]}, "prompt"),
        ({"prompt_token_ids": [[1, 320]]}, "320"),
        ({"prompt_token_ids": [[-1]]}, "-1"),
        ({"prompt_token_ids": [[True]]}, "whole numbers"),
        ({"prompts": "a", "sampling_params": SamplingParams(max_tokens=100_000)}, "100000"),
        ({"prompts": "a", "sampling_params": SamplingParams(logit_bias={5000: 1.0})}, "logit_bias"),
    ],
)
def test_what_can_not_be_served_is_refused_and_nothing_is_left(llm, arguments, named):
    with pytest.raises(ValueError, match=named):
        llm.generate(**arguments, use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("value", [5, 0.5])
def test_what_is_no_list_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=name) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 10**400), ("seed", 10**400), ("temperature", 10**400), ("logit_bias", {5: 10**400}), ("logit_bias", [(float("inf"), 1)])],
)
def test_what_no_float_holds_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=name) as refusal:
        SamplingParams(**{name: value})
    assert refusal.value.param == name


def test_one_bad_prompt_refuses_all_and_leaves_nothing(llm):
    with pytest.raises(InvalidRequest):
        llm.generate(["good", ""], GREEDY, use_tqdm=False)
    assert llm.llm_engine.get_num_unfinished_requests() == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_num_seq": 4}, "did you mean 'max_num_seqs'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"quantization": "awq"}, "awq"),
        ({"dtype": "float8"}, "dtype"),
        ({"block_size": 17}, "block_size"),
        ({"swap_space": -1}, "swap_space"),
        ({"swap_space": 1e9}, "swap_space"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"preemption_mode": "swap", "swap_space": 0}, "swap_space"),
        ({"preemption_mode": "sometimes"}, "preemption_mode"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens"),
        ({"kv_cache_memory": 1e-6}, "KV cache"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(tiny_llama, options, named):
    with pytest.raises(StartError, match=named):
        LLM(**{"model": str(tiny_llama), "num_kv_blocks": None, **options})


def test_a_request_that_can_never_fit_is_refused_with_the_largest_that_does(tiny_llama):
    llm = LLM(model=str(tiny_llama), num_kv_blocks=4, max_model_len=64)
    with pytest.raises(ValueError, match="max_tokens up to 21 here"):
        llm.generate(prompt_token_ids=[[5] * 12], sampling_params=SamplingParams(n=2, max_tokens=38), use_tqdm=False)
    params = SamplingParams(n=1, max_tokens=52, ignore_eos=True)
    (output,) = llm.generate(prompt_token_ids=[[5] * 12], sampling_params=params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 52


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (Sizes(16, 1, 1, 0, 16), "1 KV block of 16 tokens: 16 tokens, 1.0 requests of full length (16 tokens)"),
        (Sizes(16, 1, 80, 0, 1024), "80 KV blocks of 16 tokens: 1,280 tokens, 1.2 requests of full length (1,024 tokens)"),
        (Sizes(16, 1, 5461, 0, 16), "5,461 KV blocks of 16 tokens: 87,376 tokens, 5,461 requests of full length (16 tokens)"),
    ],
)
def test_the_capacity_is_told_in_whole_requests_where_there_are_many(sizes, told):
    assert sizes.summary() == told


def test_a_length_that_the_pool_can_not_hold_is_lowered_with_a_warning(tiny_llama, caplog):
    llm = LLM(model=str(tiny_llama), num_kv_blocks=3)
    assert "max_model_len lowered from 512 to 48" in caplog.text
    assert llm.llm_engine.intake.limits.max_model_len == 48


def test_max_tokens_zero_scores_the_prompt_and_nothing_else(llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    (output,) = llm.generate("the quick brown fox", params, use_tqdm=False)
    assert output.outputs[0].token_ids == ()
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert output.prompt_logprobs is not None
    assert output.prompt_token_texts is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    assert all(entry is not None and len(entry.top) == 2 for entry in output.prompt_logprobs[1:])
    assert "".join(output.prompt_token_texts) == "the quick brown fox"


def test_best_of_returns_the_likeliest(llm):
    params = SamplingParams(n=2, best_of=6, seed=4, max_tokens=6, ignore_eos=True, logprobs=0)
    (best,) = llm.generate("the", params, use_tqdm=False)
    everybody = SamplingParams(n=6, seed=4, max_tokens=6, ignore_eos=True, logprobs=0)
    (answers,) = llm.generate("the", everybody, use_tqdm=False)
    likelihood = {answer.token_ids: sum(entry.logprob for entry in answer.logprobs) for answer in answers.outputs}
    ranked = sorted(likelihood, key=lambda token_ids: -likelihood[token_ids])
    assert [answer.token_ids for answer in best.outputs] == ranked[:2]
    assert [answer.index for answer in best.outputs] == [0, 1]


@pytest.mark.parametrize("stage", ["forward", "sample", "judge"])
@pytest.mark.parametrize("kind", ["raise", "nan", "oom"])
def test_a_fault_belongs_to_one_request(llm, stage, kind):
    engine = llm.llm_engine
    prompts = [f"neighbour {index}" for index in range(5)]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    marked = RequestOptions(fault=Fault(kind=kind, stage=stage, at_token=3))
    engine.add_request("marked", "the marked one", GREEDY, options=marked)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"n{index}", prompt, GREEDY)
    tokens: dict[str, tuple[int, ...]] = {}
    errors = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            for answer in output.outputs:
                tokens[output.request_id] = tokens.get(output.request_id, ()) + answer.token_ids
            if output.error is not None:
                errors[output.request_id] = output
    assert list(errors) == ["marked"]
    assert errors["marked"].finished
    assert len(tokens["marked"]) == 3
    assert [tokens[f"n{index}"] for index in range(5)] == alone
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.device.num_free == 64


def test_a_failing_prompt_raises_and_leaves_nothing(llm):
    engine = llm.llm_engine
    engine.add_request("marked", "the", GREEDY, options=RequestOptions(fault=Fault("raise", at_token=1)))
    request_ids = ["marked"]
    with pytest.raises(EngineFault, match="prompt 0: .*injected"):
        llm._run(request_ids, HeldInterrupts(), use_tqdm=False)
    assert not engine.has_unfinished_requests()


def interrupted_at_call(number, work):
    """Ctrl-C at the number-th call of a function of the engine's, wherever that is; returns whether there were so many."""
    numbers = count()

    def trace(frame, event, _):
        path = frame.f_code.co_filename  # this file lies in a folder of that name too, and an interrupt of its own nobody catches
        if "/engine/" in path and path != __file__ and next(numbers) == number:
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("door", ["generate", "embed"])
def test_ctrl_c_leaves_nothing_behind_wherever_it_comes(llm, door):
    engine, prompts = llm.llm_engine, ["the quick", "brown fox jumps over the lazy dog", "fox"]
    args = ([SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, n=2)] * 3,) if door == "generate" else ()

    def answers():
        found = getattr(llm, door)(prompts, *args, use_tqdm=False)
        return found if door == "embed" else [output.outputs for output in found]

    usual, num_hit = answers(), 0
    for number in count(0, 61):
        if not interrupted_at_call(number, answers):
            break
        num_hit += 1
        assert not engine.has_unfinished_requests()
        engine.scheduler.blocks.check()
        assert engine.scheduler.blocks.device.num_free == 64
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert answers() == usual
    assert num_hit > 5


def test_a_second_ctrl_c_does_not_wait():
    reached = []

    def work():
        with held_interrupts():
            for number in (1, 2):
                signal.raise_signal(signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_that_is_ignored_stays_so():
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts() as held:
            signal.raise_signal(signal.SIGINT)
            held.let_through()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)


def test_greedy_steps_that_skip_the_logits_give_their_tokens(tiny_llama):
    """Where every row is greedy and wants tokens alone, the model names the best; a row with logprobs takes all the long way."""
    short = LLM(model=str(tiny_llama), num_kv_blocks=64)
    runner = short.llm_engine.executor
    assert runner._best_tokens is not None, "this machine has no compiled operators, so there is nothing to compare"
    prompts = ["the quick", "brown", "fox jumps over the lazy dog"]
    taken = short.generate(prompts, GREEDY, use_tqdm=False)
    scored = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
    full = short.generate(prompts, scored, use_tqdm=False)
    mixed = short.generate(prompts, [GREEDY, SamplingParams(seed=3, max_tokens=6, ignore_eos=True), GREEDY], use_tqdm=False)
    assert [output.outputs[0].token_ids for output in taken] == [output.outputs[0].token_ids for output in full]
    assert [mixed[at].outputs[0].token_ids for at in (0, 2)] == [taken[at].outputs[0].token_ids for at in (0, 2)]
