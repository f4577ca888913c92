"""Beams and best_of: the settled beginning as it settles, the ranked answers at the end, and nobody harmed on the way."""

import pytest

from pagestream.engine import LLM, Fault, FinishReason, InvalidRequest, RequestOutput, SamplingParams, fold
from pagestream.engine.intake import RequestOptions

BEAMS = SamplingParams(use_beam_search=True, temperature=0, n=2, best_of=4, max_tokens=40, ignore_eos=True, logprobs=2)
# Cold enough that all answers begin alike, and warm enough that they part.
BEST = SamplingParams(temperature=0.5, seed=3, n=2, best_of=4, max_tokens=24, ignore_eos=True, logprobs=2)
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
PROMPT = [7, 9, 11] * 5


@pytest.fixture(scope="module")
def llm(tiny_llama):
    return LLM(model=str(tiny_llama), dtype="float32", num_kv_blocks=200, enable_fault_injection=True)


def deltas(llm: LLM, requests: dict[str, tuple[SamplingParams, RequestOptions | None]]) -> dict[str, list[RequestOutput]]:
    engine = llm.llm_engine
    for request_id, (params, options) in requests.items():
        engine.add_request(request_id, PROMPT, params, options=options)
    found: dict[str, list[RequestOutput]] = {request_id: [] for request_id in requests}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id].append(output)
    engine.scheduler.blocks.check()
    assert engine.scheduler.blocks.device.num_free == 200
    return found


def check_stream(stream: list[RequestOutput], params: SamplingParams, llm: LLM) -> None:
    whole = fold(stream)
    assert [answer.index for answer in whole.outputs] == list(range(params.n))
    for answer in whole.outputs:
        assert len(answer.token_ids) == params.max_tokens
        assert "".join(answer.token_texts) == answer.text
        assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
        assert sum(entry.logprob for entry in answer.logprobs) == pytest.approx(answer.cumulative_logprob, abs=1e-4)
        assert answer.finish_reason is FinishReason.LENGTH
    likelihoods = [answer.cumulative_logprob for answer in whole.outputs]
    assert likelihoods == sorted(likelihoods, reverse=True)
    assert whole.usage.num_output_tokens == params.best_of * params.max_tokens
    for output in stream[:-1]:
        texts = {(answer.text, answer.token_ids) for answer in output.outputs}
        assert len(texts) == 1, "what is sent before the end is the beginning of every answer"
        assert [answer.index for answer in output.outputs] == list(range(params.n))
    assert [output.finished for output in stream] == [False] * (len(stream) - 1) + [True]


@pytest.mark.parametrize("params", [BEAMS, BEST], ids=["beams", "best_of"])
def test_the_settled_beginning_goes_out_before_the_end(llm, params):
    stream = deltas(llm, {"one": (params, None)})["one"]
    check_stream(stream, params, llm)
    assert len(stream) > 1, "nothing settled before the end: the test shows nothing"


def test_best_of_gives_the_likeliest_of_all_answers(llm):
    every = fold(deltas(llm, {"all": (SamplingParams(temperature=0.5, seed=3, n=4, max_tokens=24, ignore_eos=True, logprobs=0), None)})["all"])
    likelihood = {answer.token_ids: sum(entry.logprob for entry in answer.logprobs) for answer in every.outputs}
    best = fold(deltas(llm, {"best": (BEST, None)})["best"])
    assert [answer.token_ids for answer in best.outputs] == sorted(likelihood, key=lambda tokens: -likelihood[tokens])[:2]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_beams_that_give_way_are_the_same_and_disturb_nobody(llm, tiny_llama, mode):
    asked = {"greedy": GREEDY, "beams": BEAMS, "more": BEAMS, "others": GREEDY}
    alone = {request_id: fold(deltas(llm, {request_id: (params, None)})[request_id]).outputs for request_id, params in asked.items()}
    small = LLM(
        model=str(tiny_llama),
        dtype="float32",
        num_kv_blocks=16,
        swap_space=0.01,
        preemption_mode=mode,
        max_num_batched_tokens=16,
        max_num_seqs=16,
    )
    engine = small.llm_engine
    found: dict[str, list[RequestOutput]] = {request_id: [] for request_id in asked}
    for request_id, params in asked.items():
        engine.add_request(request_id, PROMPT, params)
        for _ in range(3):
            for output in engine.step():
                found[output.request_id].append(output)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id].append(output)
    counters = engine.scheduler.counters
    assert (counters.num_preempted_swap if mode == "swap" else counters.num_preempted_recompute) > 0
    assert engine.scheduler.blocks.device.num_free == 16
    assert {request_id: fold(stream).outputs for request_id, stream in found.items()} == alone


@pytest.mark.parametrize("stage", ["forward", "sample", "judge"])
def test_a_faulty_search_fails_alone(llm, stage):
    fault = RequestOptions(fault=Fault("raise", stage, at_token=6))
    found = deltas(llm, {"good": (BEAMS, None), "bad": (BEAMS, fault), "greedy": (GREEDY, None)})
    assert "injected" in found["bad"][-1].error
    assert {answer.finish_reason for answer in found["bad"][-1].outputs} == {FinishReason.ERROR}
    assert [answer.index for answer in found["bad"][-1].outputs] == [0, 1]
    alone = deltas(llm, {"good": (BEAMS, None)})["good"]
    assert fold(found["good"]).outputs == fold(alone).outputs


@pytest.mark.parametrize("params", [BEAMS, BEST], ids=["beams", "best_of"])
def test_leaving_after_any_step_frees_everything(llm, params):
    engine = llm.llm_engine
    for num_steps in range(1, 20, 3):
        engine.add_request("gone", PROMPT, params)
        for _ in range(num_steps):
            engine.step()
        (last,) = engine.abort_request("gone")
        assert [(answer.index, answer.finish_reason) for answer in last.outputs] == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
        engine.scheduler.blocks.check()
        assert engine.scheduler.blocks.device.num_free == 200


@pytest.mark.parametrize(("ends", "n"), [(range(255), 80), (range(30, 280), 4)], ids=["too few", "enough"])
def test_beams_of_which_most_may_not_end_yet(tiny_llama, ends, n):
    """Where parameters leave fewer answers than n the request fails by itself, instead of telling of some and never of others."""
    llm = LLM(model=str(tiny_llama), dtype="float32", num_kv_blocks=300, max_num_seqs=128)
    params = SamplingParams(
        use_beam_search=True, temperature=0, n=n, max_tokens=1, min_tokens=1, ignore_eos=True, stop_token_ids=ends
    )
    *_, last = deltas_of(llm, params)
    assert last.finished
    assert [answer.index for answer in last.outputs] == list(range(n))
    reasons = {answer.finish_reason for answer in last.outputs}
    if n == 80:
        assert "fewer answers than n" in last.error
        assert reasons == {FinishReason.ERROR}
    else:
        assert reasons == {FinishReason.LENGTH}
    llm.llm_engine.scheduler.blocks.check()
    assert llm.llm_engine.scheduler.blocks.device.num_free == 300


def deltas_of(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    llm.llm_engine.add_request("one", PROMPT, params)
    found: list[RequestOutput] = []
    while llm.llm_engine.has_unfinished_requests():
        found += llm.llm_engine.step()
    return found


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"3": 1}}, "logit_bias"),
        ({"allowed_token_ids": [3]}, "allowed_token_ids"),
        ({"n": 1}, "use_beam_search"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": 100}, "length_penalty"),
        ({"stop_token_ids": range(257)}, "stop_token_ids"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_contradicts_beams_is_refused_by_name(wrong, param):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{"use_beam_search": True, "temperature": 0.0, "n": 2, **wrong})
    assert caught.value.param == param
