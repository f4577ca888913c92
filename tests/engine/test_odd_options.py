"""Options at their ends change how long an answer takes, and nothing of the answer."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagestream.engine import LLM, EngineArgs, InvalidRequest, RequestFailed, SamplingParams, StartError, factory, fold
from pagestream.engine.core.config import SchedulerLimits
from pagestream.engine.intake import RequestOptions
from pagestream.engine.measure import measure_machine
from pagestream.engine.model_choice import Kernels
from pagestream.engine.models.checkpoint import open_checkpoint

PROMPTS = [[9], [7, 8] * 9, [11, 12, 13] * 21, [5] * 16]
GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=1, ignore_eos=True)
SEEDED = SamplingParams(temperature=1, seed=4, max_tokens=40, logprobs=1, ignore_eos=True)


def llm(folder, **options):
    return LLM(**{"model": str(folder), "num_kv_blocks": 60, "max_model_len": 256, **options})


def answers(engine, params):
    outputs = engine.generate(prompt_token_ids=PROMPTS, sampling_params=params, use_tqdm=False)
    blocks = engine.llm_engine.scheduler.blocks
    blocks.check()
    assert blocks.device.num_free == blocks.device.num_blocks
    return [output.outputs for output in outputs]


@pytest.fixture(scope="module")
def usual(tiny_llama):
    engine = llm(tiny_llama)
    return {params: answers(engine, params) for params in (GREEDY, SEEDED)}


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 3, "max_num_batched_tokens": 3},
        {"max_num_prefill_tokens": 1},
        {"block_size": 48, "num_kv_blocks": 20},
        {"block_size": 256, "num_kv_blocks": 4},
        {"block_size": 1024, "num_kv_blocks": 1},
        {"num_kv_blocks": 7, "swap_space": 0},
        {"num_kv_blocks": 7, "swap_space": 0.001, "preemption_mode": "swap"},
        {"scheduling_policy": "priority", "num_kv_blocks": 8},
        {"enable_prefix_caching": False, "num_kv_blocks": 7},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_answers_are_the_usual_ones(tiny_llama, usual, options, params):
    assert answers(llm(tiny_llama, **options), params) == usual[params]


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("max_model_len", "8", "a whole number"), ("max_num_seqs", 2.5, "a whole number"), ("num_kv_blocks", True, "a whole number"),
        ("block_size", None, "a whole number"), ("seed", "x", "a whole number"), ("swap_space", "1", "a number"),
        ("gpu_memory_utilization", None, "a number"), ("kv_cache_memory", True, "a number"), ("enable_prefix_caching", "no", "true or false"),
        ("trust_remote_code", "false", "true or false"), ("enforce_eager", None, "true or false"), ("model", 1, "a text"),
        ("chat_template", 1, "a text"), ("max_context_len_to_capture", 0, "at least 1"),
    ],
)  # fmt: skip
def test_an_option_of_another_kind_is_refused_by_name(tiny_llama, option, value, reason):
    with pytest.raises(StartError, match=f"{option} must be {reason}, not"):
        llm(tiny_llama, **{option: value})


def test_a_model_may_be_given_as_a_path(tiny_llama):
    assert EngineArgs.from_options({"model": tiny_llama}).to_config().model.model == str(tiny_llama)


@pytest.mark.parametrize("prompt", [b"bytes", 5, None])
def test_what_is_neither_a_text_nor_token_ids_is_refused(tiny_llama, prompt):
    engine = llm(tiny_llama)
    with pytest.raises(InvalidRequest, match="prompt must be a text or a list of token ids"):
        engine.generate([prompt], GREEDY)
    with pytest.raises(InvalidRequest, match="sampling_params must be SamplingParams"):
        engine.generate(["text"], [{"temperature": 0}])


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"])
@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_switch_is_true_or_false(name, value):
    with pytest.raises(InvalidRequest, match=f"{name} must be true or false"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("max_model_len", [2, 8, 17])
def test_nothing_at_the_start_is_longer_than_a_request_may_be(tiny_llama, kernels, max_model_len):
    options = {"model": str(tiny_llama), "num_kv_blocks": 60, "max_model_len": max_model_len, "kernels": kernels}
    (output,) = LLM(**options).generate(prompt_token_ids=[[9]], sampling_params=SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == max_model_len - 1
    machine = measure_machine(EngineArgs.from_options(options).to_config())
    assert machine.num_blocks == 60


def test_nor_is_what_a_gpus_memory_is_shared_out_by(tiny_llama, monkeypatch):
    asked = []
    monkeypatch.setattr(factory, "measure_activations", lambda model, *sizes: asked.append(sizes) or 0)
    config = EngineArgs(model=str(tiny_llama), max_model_len=40).to_config()
    model = factory.ModelChoice(config, torch.device("cpu"), Kernels.TORCH).load(open_checkpoint(config.model))
    gpu = torch.device("cuda")
    factory.activation_bytes(model, SchedulerLimits(16, 512), config, gpu)
    assert asked == [(512, 16, 16, gpu, 40)]


@pytest.mark.parametrize(("dtype", "hint"), [("float32", "weights may be damaged"), ("float16", "too large for float16, try dtype bfloat16")])
def test_a_model_that_gives_no_numbers_is_refused_at_the_start(tiny_llama, tmp_path, dtype, hint):
    folder = shutil.copytree(tiny_llama, tmp_path / "spoilt")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartError, match=f"spoilt can't be served, the model's logits are not finite numbers; .*{hint}"):
        llm(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 3}, "n"), ({"best_of": 3}, "best_of"), ({"n": 3, "use_beam_search": True, "temperature": 0}, "n")]
)
def test_more_answers_than_may_run_at_once_are_refused_by_name(tiny_llama, fields, param):
    with pytest.raises(InvalidRequest, match="at most 2 sequences at once") as refused:
        llm(tiny_llama, max_num_seqs=2).generate(prompt_token_ids=[[1]], sampling_params=SamplingParams(**fields))
    assert refused.value.param == param


def test_equal_priorities_are_served_in_the_order_of_arrival(tiny_llama):
    engine = llm(tiny_llama, scheduling_policy="priority", max_num_seqs=1).llm_engine
    for request_id, priority in (("b", 1), ("a", 1), ("urgent", -5), ("c", 1), ("late", 2)):
        engine.add_request(request_id, [9], SamplingParams(max_tokens=1), options=RequestOptions(priority=priority))
    order = []
    while engine.has_unfinished_requests():
        order += [output.request_id for output in engine.step() if output.finished]
    assert order == ["urgent", "b", "a", "c", "late"]


def test_best_of_with_a_stop_string_ranks_answers_that_end_at_different_lengths(tiny_llama):
    engine = llm(tiny_llama)
    asked = {"temperature": 1, "seed": 8, "max_tokens": 60, "ignore_eos": True, "logprobs": 0}
    (plain,) = engine.generate(prompt_token_ids=[PROMPTS[1]], sampling_params=SamplingParams(**asked, n=6), use_tqdm=False)
    stops = [plain.outputs[1].text[8:10], plain.outputs[4].text[20:23]]
    (every,) = engine.generate(prompt_token_ids=[PROMPTS[1]], sampling_params=SamplingParams(**asked, n=6, stop=stops), use_tqdm=False)
    (best,) = engine.generate(
        prompt_token_ids=[PROMPTS[1]], sampling_params=SamplingParams(**asked, n=3, best_of=6, stop=stops), use_tqdm=False
    )
    assert len({len(answer.token_ids) for answer in every.outputs}) > 1, "all are as long: the test shows nothing"
    ranked = sorted(every.outputs, key=lambda answer: -sum(entry.logprob for entry in answer.logprobs))
    assert [(answer.text, answer.stop_reason) for answer in best.outputs] == [(answer.text, answer.stop_reason) for answer in ranked[:3]]
    assert best.usage.num_output_tokens == sum(len(answer.token_ids) for answer in every.outputs)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(n=3, seed=1, max_tokens=20, ignore_eos=True)], ids=["one", "forked"])
def test_who_is_swapped_out_may_leave(tiny_llama, usual, params):
    engine = llm(tiny_llama, num_kv_blocks=8, swap_space=0.01, preemption_mode="swap").llm_engine
    scheduler = engine.scheduler
    engine.add_request("stays", PROMPTS[2], GREEDY)
    num_left = 0
    parts = []
    for number in range(40):
        engine.add_request(f"leaves{number}", PROMPTS[0], params)
        if engine.scheduler.group("stays") is None:
            break
        for _ in range(2):
            parts += [output for output in engine.step() if output.request_id == "stays"]
        for group in list(scheduler.swapped):
            num_left += len(engine.abort_request(group.request.request_id))
            scheduler.blocks.check()
    assert num_left > 0, "nobody was swapped out: the test shows nothing"
    engine.abort_request([f"leaves{number}" for number in range(40)])
    while engine.has_unfinished_requests():
        parts += engine.step()
    assert fold(parts).outputs == usual[GREEDY][2]
    assert (scheduler.blocks.device.num_free, scheduler.blocks.host.num_free) == (8, scheduler.blocks.host.num_blocks)


@pytest.mark.parametrize(
    ("value", "limits"),
    [(-1, "between 0 and 4096 GiB"), (10_000, "between 0 and 4096 GiB"), (float("nan"), "a number"), (float("inf"), "a number")],
)
def test_a_swap_space_that_makes_no_sense_is_refused_with_its_limits(tiny_llama, value, limits):
    with pytest.raises(StartError, match=f"swap_space must be {limits}"):
        llm(tiny_llama, swap_space=value)


@pytest.mark.parametrize(
    "options", [{"kv_cache_memory": 4096, "num_kv_blocks": None}, {"num_kv_blocks": 10**9}, {"swap_space": 4096}], ids=lambda options: next(iter(options))
)
def test_more_memory_than_there_is_is_refused_by_name(tiny_llama, options):
    with pytest.raises(StartError, match=f"^{next(iter(options))} .* GiB .*free"):
        llm(tiny_llama, **options)


def test_swap_needs_room_for_a_block(tiny_llama):
    with pytest.raises(StartError, match="swap_space"):
        llm(tiny_llama, swap_space=1e-9, preemption_mode="swap")


def test_a_text_that_can_not_be_begun_is_an_error_at_once(tiny_llama, monkeypatch):
    engine = llm(tiny_llama)
    monkeypatch.setattr("pagestream.engine.output_processor.StopStrings", lambda *_, **__: 1 / 0)
    with pytest.raises(RequestFailed, match="division"):
        engine.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY, use_tqdm=False)
    assert not engine.llm_engine.has_unfinished_requests()
