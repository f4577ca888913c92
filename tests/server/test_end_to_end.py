"""The server around the real engine, over a tiny checkpoint whose byte-level tokens often end within a character."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from pagestream.engine import AsyncLLMEngine, EngineArgs
from pagestream.server.metrics import Metrics
from tests.server.conftest import Live, events_of, refusal_of, served
from tests.server.test_chat import both_ways as chat_both_ways
from tests.server.test_completions import PROMPTS, both_ways
from tests.tiny_models import VOCAB_SIZE, make_checkpoint

GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("models") / "llama")
    metrics = Metrics("m")
    args = EngineArgs(
        model=str(folder), num_kv_blocks=256, max_num_seqs=16, device="cpu", cpu_threads=1, enable_fault_injection=True
    )
    with served(AsyncLLMEngine.from_engine_args(args, metrics), metrics) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(live: Live) -> Iterator[None]:
    """After every test all blocks are free and the server answers as before."""
    before = live.complete(prompt="Hello", max_tokens=4, temperature=0).json()["choices"]
    yield
    live.until(
        lambda: (
            not any(
                live.metric(f"vllm:{name}") for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            )
        ),
        "idle",
    )
    assert live.complete(prompt="Hello", max_tokens=4, temperature=0).json()["choices"] == before


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_equals_whole(live: Live, prompt):
    body = both_ways(live, prompt=prompt, **GREEDY)
    assert body["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("prompt", ["the quick brown", "京都の", "é"])
def test_echo_and_logprobs_agree_about_every_token(live: Live, prompt):
    choice = both_ways(live, prompt=prompt, **GREEDY, echo=True, logprobs=3)["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    assert text.startswith(prompt)
    assert "".join(logprobs["tokens"]) == text
    assert all(text[at : at + len(token)] == token for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
    assert all(
        token in top and 3 <= len(top) <= 4
        for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]
    )
    places = list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]
    assert all(top != after_top for (token, top), (after, after_top) in itertools.pairwise(places) if token != after)


def test_the_prompt_can_be_scored_alone(live: Live):
    choice = both_ways(live, prompt="the quick brown fox", max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert choice["text"] == "the quick brown fox"
    first, *rest = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert all(value < 0 for value in rest)


def test_prompt_logprobs_do_not_depend_on_who_asked(live: Live):
    fields = {"prompt": "the quick brown fox", "max_tokens": 1, "temperature": 0}
    scored = both_ways(live, **fields, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    echoed = both_ways(live, **fields, echo=True, logprobs=2)["choices"][0]["logprobs"]
    chosen = [None if entry is None else next(iter(entry.values()))["logprob"] for entry in scored]
    assert chosen == echoed["token_logprobs"][: len(chosen)]


def test_a_batch_is_the_sum_of_its_prompts(live: Live):
    batch = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 12}
    together = both_ways(live, prompt=["One", "Twenty"], **batch)["choices"]
    alone = [choice for prompt in ("One", "Twenty") for choice in live.complete(prompt=prompt, **batch).json()["choices"]]
    assert [choice["text"] for choice in together] == [choice["text"] for choice in alone]


def test_the_likeliest_of_several_answers_come_back(live: Live):
    fields = {"prompt": "the quick", "temperature": 1, "seed": 3, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    every = both_ways(live, **fields, n=4)["choices"]
    best = live.complete(**fields, n=2, best_of=4).json()
    by_likelihood = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in by_likelihood[:2]]
    assert best["usage"]["completion_tokens"] == 32


def test_the_context_has_an_exact_end(live: Live):
    limit = live.engine.max_model_len
    for stream in (False, True):
        assert live.complete(prompt=[40] * (limit - 1), max_tokens=1, stream=stream).status_code == 200
        for length in (limit, limit + 1):
            error = refusal_of(live.complete(prompt=[40] * length, max_tokens=1, stream=stream))
            assert error["code"] == "context_length_exceeded"
            assert all(str(number) in error["message"] for number in (length, 1, limit))
    assert live.complete(prompt=[40] * (limit - 1), max_tokens=1).json()["usage"]["prompt_tokens"] == limit - 1
    full = both_ways(live, prompt=[40] * limit, max_tokens=0)  # scored, at most, but nothing is to follow
    assert full["usage"]["total_tokens"] == limit


def test_stops_are_cut_wherever_they_lie(live: Live):
    fields = {"prompt": "the quick brown fox", **GREEDY}
    text = live.complete(**fields).json()["choices"][0]["text"]
    for start in range(0, len(text) - 5, 9):
        for kept in (False, True):
            stop = text[start : start + 5]
            choice = both_ways(live, **fields, stop=[stop], include_stop_str_in_output=kept)["choices"][0]
            assert choice["text"] == text[: text.find(stop)] + stop * kept
            assert choice["finish_reason"] == "stop"


def test_a_cached_beginning_is_told(live: Live):
    prompt = "the morning comes again and again until the forest sleeps"
    size = live.complete(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens"]
    cached = live.complete(prompt=prompt, max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < size
    salted = live.complete(prompt=prompt, max_tokens=1, cache_salt="mine").json()["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]
    assert salted == 0


def test_forced_and_forbidden_tokens(live: Live):
    token_id = 40
    forced = both_ways(live, prompt="a", max_tokens=5, allowed_token_ids=[token_id], ignore_eos=True)["choices"][0]["text"]
    assert forced == live.engine.tokenizer.decode([token_id] * 5)
    assert (
        both_ways(live, prompt="a", max_tokens=5, temperature=0, logit_bias={str(token_id): 100})["choices"][0]["text"] == forced
    )
    assert refusal_of(live.complete(prompt="a", allowed_token_ids=[VOCAB_SIZE]))["param"] == "allowed_token_ids"
    assert refusal_of(live.complete(prompt=[VOCAB_SIZE]))["param"] == "prompt"


@pytest.mark.parametrize("n", [1, 2])
def test_chat(live: Live, n):
    chat_both_ways(live, text="Hello", n=n, temperature=1, seed=1, max_tokens=24, logprobs=True, top_logprobs=2)


def test_chat_may_fill_the_context(live: Live):
    body = live.chat("the " * 100, temperature=0, ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == live.engine.max_model_len == 512


def test_a_conversation_that_the_template_refuses_is_the_callers_matter(live: Live):
    assert refusal_of(live.chat(messages=[{"role": "user", "content": "a" * 3000}]))["code"] == "context_length_exceeded"


def test_company_changes_no_answer(live: Live):
    bodies = [
        {
            "prompt": f"story {i} " * (1 + i % 4),
            "temperature": i % 2,
            "seed": i,
            "max_tokens": 30,
            "ignore_eos": True,
            "logprobs": 1,
        }
        for i in range(12)
    ]
    alone = [live.complete(**body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(12) as pool:
        together = [call.result().json()["choices"] for call in [pool.submit(live.complete, **body) for body in bodies]]
    assert together == alone


def test_a_seed_gives_its_text_beside_unseeded_neighbours_that_differ(live: Live):
    unseeded = {"prompt": "Tell", "temperature": 1, "max_tokens": 40, "ignore_eos": True}
    seeded = unseeded | {"seed": 7}
    alone = live.complete(**seeded).json()["choices"]
    with ThreadPoolExecutor(10) as pool:
        calls = [pool.submit(live.complete, **body) for body in [*[unseeded] * 4, seeded, *[unseeded] * 4, seeded]]
        answers = [call.result().json()["choices"] for call in calls]
    assert answers.pop(9) == alone
    assert answers.pop(4) == alone
    assert len({answer[0]["text"] for answer in answers}) == len(answers)


def test_a_seed_gives_its_text_while_neighbours_come_and_leave(live: Live):
    seeded = {"prompt": "Tell", "temperature": 1, "max_tokens": 200, "ignore_eos": True, "seed": 7}
    alone = live.complete(**seeded).json()["choices"]
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(live.complete, **seeded) for _ in range(2)]
        for number in range(8):
            sock = live.connect({"prompt": "Tell", "temperature": 1, "max_tokens": 300, "ignore_eos": True, "stream": True})
            raw = b""
            while raw.count(b"data: ") < number % 3:
                raw += sock.recv(4096)
            sock.close()
        assert [call.result().json()["choices"] for call in calls] == [alone, alone]


@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, -(2**63)])
def test_every_seed_that_is_taken_is_one(live: Live, seed):
    asked = {"prompt": "Tell", "temperature": 1, "max_tokens": 12, "ignore_eos": True, "seed": seed}
    both_ways(live, **asked)


@pytest.mark.parametrize(
    "fields", [{"temperature": 1e-45}, {"temperature": 1e-4, "top_p": 1e-4}, {"temperature": 2, "top_k": 1}, {"top_p": 0}]
)
def test_extreme_but_legal_values_give_the_greedy_text(live: Live, fields):
    asked = {"prompt": "the quick brown", "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    greedy = live.complete(**asked, temperature=0).json()["choices"]
    assert live.complete(**asked, **fields, seed=5).json()["choices"] == greedy


def test_refused_requests_leave_a_running_stream_as_it_was(live: Live):
    asked = {"prompt": "the quick brown", "max_tokens": 120, "temperature": 1, "seed": 9, "ignore_eos": True, "stream": True}

    def text_of(answer: httpx.Response) -> str:
        """All of it: where the chunks are cut is the reader's pace."""
        return "".join(event["choices"][0]["text"] for event in events_of(answer))

    alone = text_of(live.complete(**asked))
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(live.complete, **asked)
        for prompt in ([1, VOCAB_SIZE], [-1], [[1, 2], [99999999999]], [True, False], [1.5]):
            assert refusal_of(live.complete(prompt=prompt, max_tokens=1))["param"].partition("[")[0] == "prompt"
        assert text_of(beside.result()) == alone


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1}, {"prompt": ["one", "two"]}], ids=["one", "n", "batch"])
def test_a_reader_who_leaves_frees_everything(live: Live, num_chunks, fields):
    finished = 'vllm:request_success_total{engine="0",finished_reason="abort"'
    before = live.metric(finished)
    pause = {"kind": "slow", "at_token": 100, "seconds": 2}  # so that no answer ends before its reader was seen to leave
    body: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 480, "ignore_eos": True, "x_fault": pause, **fields}
    sock = live.connect({**body, "stream": True})
    raw = b""
    while raw.count(b"data: ") < num_chunks:
        raw += sock.recv(4096)
    live.until(lambda: live.metric("vllm:num_requests_running") > 0 or num_chunks > 0, "running")
    sock.close()
    live.until(
        lambda: live.metric(finished) == before + len(fields.get("prompt", "x") if fields.get("prompt") else "x"), "aborted"
    )


@pytest.mark.parametrize("kind", ["raise", "nan"])
@pytest.mark.parametrize("stage", ["forward", "sample"])
def test_a_fault_hits_its_own_request_only(live: Live, kind, stage):
    body = {"prompt": "recipe", **GREEDY}
    marked = {**body, "x_fault": {"kind": kind, "stage": stage if kind == "raise" else "forward", "at_token": 5}}
    want = live.complete(**body).json()["choices"]
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(live.complete, **body) for _ in range(4)]
        faulty = [pool.submit(live.complete, **marked), pool.submit(live.complete, **marked, stream=True)]
    assert refusal_of(faulty[0].result(), 500)["code"] == "request_failed"
    raw = faulty[1].result().content
    if faulty[1].result().status_code == 200:
        events = [json.loads(found) for found in re.findall(rb"data: (\{.*\})", raw)]
        assert "error" in events[-1]
        assert raw.endswith(b"data: [DONE]\n\n")
    assert [other.result().json()["choices"] for other in others] == [want] * 4


def test_counters_close(live: Live):
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        'vllm:request_success_total{engine="0",finished_reason="length"',
    )
    before = [live.metric(name) for name in names]
    usages = [live.complete(prompt="the quick brown", n=n, **(GREEDY | {"temperature": 1})).json()["usage"] for n in (1, 2)]
    after = [live.metric(name) for name in names]
    gained = [b - a for a, b in zip(before, after, strict=True)]
    assert gained == [sum(usage["prompt_tokens"] for usage in usages), sum(usage["completion_tokens"] for usage in usages), 2]


STRUCTURED = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"enum": ["x", 3]}}}},
    {"structured_outputs": {"regex": "[ab]{2,4}-é"}},
    {"structured_outputs": {"choice": ["red", "green"]}},
    {"structured_outputs": {"grammar": 'start: "(" start ")" | "."'}},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}},
]


@pytest.mark.parametrize("fields", STRUCTURED)
def test_structured_output(live: Live, fields):
    sampled = {"n": 2, "temperature": 1, "seed": 1, "max_tokens": 60}
    body = chat_both_ways(live, **sampled, **fields, logprobs=True, top_logprobs=1)
    assert body["choices"][0]["finish_reason"] == "stop"
    completed = both_ways(live, prompt="the", **sampled, **fields, logprobs=1)
    is_right = {
        "regex": lambda text: re.fullmatch("[ab]{2,4}-é", text),
        "choice": lambda text: text in ("red", "green"),
        "grammar": lambda text: re.fullmatch(r"\(*\.\)*", text),
        "json": lambda text: all(type(each) is bool for each in json.loads(text)),
        "type": lambda text: json.loads(text) in ("x", 3),
    }[next(iter(next(iter(fields.values()))))]
    for text in [choice["message"]["content"] for choice in body["choices"]] + [choice["text"] for choice in completed["choices"]]:
        assert is_right(text), text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}, "response_format"),
    ],
)
def test_a_bad_constraint_is_the_callers_matter(live: Live, fields, param, stream):
    error = refusal_of(live.chat(**fields, stream=stream))
    assert (error["param"], error["code"]) == (param, "invalid_constraint")
