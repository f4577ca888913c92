"""What operators see: probes, metrics, ids, keys, overload."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest

from pagestream.engine import FinishReason, RequestStats, StepStats
from pagestream.server.metrics import Metrics
from pagestream.server.responses import ModelList
from tests.server.conftest import Live, refusal_of

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(("path", "status"), [("/health", "ok"), ("/livez", "ok"), ("/readyz", "ready")])
def test_probes_of_a_well_server(live: Live, path, status):
    response = live.client.get(path)
    assert (response.status_code, response.json()) == (200, {"status": status})


def test_only_readiness_fails_while_draining(start):
    live: Live = start()
    live.engine.is_draining = True
    assert live.client.get("/readyz").status_code == 503
    assert live.client.get("/health").status_code == live.client.get("/livez").status_code == 200
    response = live.complete(prompt="a")
    assert refusal_of(response, 503)["code"] == "server_draining"
    assert response.headers["retry-after"] == "3"


def test_version_and_models(live: Live):
    assert live.client.get("/version").json() == {"version": version("pagestream")}
    body = live.client.get("/v1/models").json()
    assert [card.id for card in ModelList.model_validate(body).data] == ["m", "other/name"]
    assert body["data"][0]["max_model_len"] == live.engine.max_model_len
    assert live.client.get("/v1/models/other/name").json() == body["data"][1]


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/", "/version", "/metrics", "/v1/models", "/v1/models/m", "/openapi.json"])
def test_whatever_is_got_may_be_asked_without_its_body(live: Live, path):
    response = live.client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-type"] == live.client.get(path).headers["content-type"]
    assert path not in [key for key, item in live.app.openapi()["paths"].items() if "head" in item]


def test_the_head_of_an_endless_stream_is_not_waited_for(live: Live):
    assert live.client.head("/v1/engine/events").status_code == 405


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/nothing")])
def test_every_response_says_how_long_it_took(live: Live, method, path):
    headers = live.client.request(method, path, json={"model": "m", "prompt": "a"} if method == "POST" else None).headers
    assert int(headers["openai-processing-ms"]) >= 0


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nowhere", "/metrics"])
def test_a_clients_request_id_comes_back(live: Live, path):
    assert live.client.get(path, headers={"X-Request-Id": "abc-123"}).headers["x-request-id"] == "abc-123"
    fresh = [live.client.get(path).headers["x-request-id"] for _ in range(2)]
    assert fresh[0] != fresh[1]


@pytest.mark.parametrize("odd", ["", "a b", "x" * 129, "é"])
def test_an_odd_request_id_is_replaced(live: Live, odd):
    given = live.client.get("/health", headers=[(b"X-Request-Id", odd.encode("latin-1"))]).headers["x-request-id"]
    assert given
    assert given != odd


def test_two_requests_with_the_same_id_are_two(live: Live):
    headers = {"X-Request-Id": "same"}
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(
                live.client.post, "/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 20}, headers=headers
            )
            for _ in range(4)
        ]
    replies = [call.result() for call in calls]
    assert [reply.status_code for reply in replies] == [200] * 4
    assert len({reply.json()["id"] for reply in replies}) == 4


def test_a_key_is_asked_for_below_v1_only(start):
    live: Live = start(api_keys=("secret", "other"))
    assert live.client.get("/health").status_code == live.client.get("/metrics").status_code == 200
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "secret"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer"},
    ):
        response = live.client.get("/v1/models", headers=header)
        error = refusal_of(response, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    for key in ("secret", "other"):
        assert live.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_browsers_of_allowed_origins_may_call(start):
    live: Live = start(allowed_origins=("http://a.example",), api_keys=("secret",))
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,authorization"}
    response = live.client.options("/v1/completions", headers={"Origin": "http://a.example", **ask})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://a.example"
    assert (
        "access-control-allow-origin"
        not in live.client.options("/v1/completions", headers={"Origin": "http://b.example", **ask}).headers
    )


def test_a_full_queue_is_told_at_once(start):
    live: Live = start({"max_num_seqs": 2, "max_num_queued": 4, "step_s": 0.02})
    with ThreadPoolExecutor(50) as pool:
        calls = [pool.submit(live.complete, prompt=f"Story {i}", max_tokens=30, stream=bool(i % 2), **GREEDY) for i in range(50)]
        while not all(call.done() for call in calls):
            assert live.client.get("/health").status_code == 200
            time.sleep(0.05)
    replies = [call.result() for call in calls]
    refused = [reply for reply in replies if reply.status_code != 200]
    assert 6 <= len(replies) - len(refused) < 50
    for reply in refused:
        error = refusal_of(reply, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "server_overloaded")
        assert reply.headers["retry-after"] == "1"
    assert live.metric("vllm:admission_rejections_total") == len(refused)
    assert live.metric('http_requests_total{handler="/v1/completions",method="POST",status="429"') == len(refused)


def test_while_the_queue_is_full_nobody_is_read_but_who_may_have_his_answer_already(start):
    live: Live = start({"max_num_seqs": 1, "max_num_queued": 0, "step_s": 0.02})
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(live.complete, prompt="A long story", max_tokens=100, **GREEDY)
        while not live.metric("vllm:num_requests_running"):
            time.sleep(0.01)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"):
            assert live.client.post(path, content=b"no JSON").status_code == 429, path
            assert live.metric(f'http_requests_total{{handler="{path}",method="POST",status="429"') == 1
        read = live.client.post("/v1/completions", json={"prompt": 7.5}, headers={"Idempotency-Key": "one"})
        assert read.status_code == 400
        assert live.client.get("/v1/models").status_code == 200
        assert call.result().status_code == 200
    assert live.complete(prompt="Again", max_tokens=2).status_code == 200


def test_counters_close(start):
    live: Live = start()
    finished = 'vllm:request_success_total{engine="0",finished_reason="'
    usage = [
        live.complete(prompt="The counting house", max_tokens=20, n=n, seed=1, ignore_eos=True).json()["usage"] for n in (1, 2)
    ]
    text = live.complete(prompt="The counting house", max_tokens=20, **GREEDY).json()["choices"][0]["text"]
    usage.append(live.complete(prompt="The counting house", max_tokens=20, **GREEDY, stop=[text[10:14]]).json()["usage"])
    live.complete(prompt="a", temperature=-1)
    live.complete(prompt="a", max_tokens=20, ignore_eos=True, x_fault={"kind": "raise", "at_token": 3})
    assert [live.metric(finished + reason) for reason in ("stop", "length", "abort", "error")] == [1, 3, 0, 1]
    usage.append(
        {"prompt_tokens": 18 + 1, "completion_tokens": 20 + 3}
    )  # of the answer that gave the text, and of the failed one
    assert live.metric("vllm:prompt_tokens_total") == sum(each["prompt_tokens"] for each in usage)
    assert live.metric("vllm:generation_tokens_total") == sum(each["completion_tokens"] for each in usage)
    http = 'http_requests_total{handler="/v1/completions",method="POST",status="'
    assert [live.metric(http + status) for status in ("200", "400", "500")] == [4, 1, 1]
    assert live.metric("vllm:time_to_first_token_seconds_count") == 5
    for gauge in ("num_requests_running", "num_requests_waiting", "num_requests_swapped", "kv_cache_usage_perc"):
        assert live.metric(f"vllm:{gauge}") == 0


def test_gauges_are_of_the_moment(start):
    live: Live = start({"max_num_seqs": 1, "step_s": 0.02})
    socks = [live.connect({"prompt": "a" * 32, "max_tokens": 300, "stream": True, **GREEDY}) for _ in range(3)]
    live.until(lambda: live.metric("vllm:num_requests_waiting") == 2, "two wait")
    assert live.metric("vllm:num_requests_running") == 1
    assert 0 < live.metric("vllm:kv_cache_usage_perc") < 1
    for sock in socks:
        sock.close()
    live.until(lambda: live.metric("vllm:num_requests_running") == 0, "all are gone")


def test_metrics_are_prometheus_text_with_the_process_in_it(live: Live):
    response = live.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert live.metric("process_start_time_seconds") > 0
    assert 'model_name="m"' in response.text


def test_unknown_paths_share_one_label(live: Live):
    for i in range(3):
        live.client.get(f"/nowhere/{i}")
        live.client.request(f"VERB{i}", "/health")
    text = live.client.get("/metrics").text
    assert "/nowhere" not in text
    assert "VERB" not in text


def test_the_listener_counts_what_a_step_says():
    metrics = Metrics("m")
    metrics.step_done(
        StepStats(
            num_running=1,
            num_waiting=2,
            num_swapped=3,
            num_used_blocks=4,
            num_blocks=5,
            num_scheduled_tokens=6,
            num_preempted_recompute=2,
            num_preempted_swap=1,
            num_swapped_in_blocks=8,
            num_copied_blocks=9,
            num_prefix_queried_tokens=100,
            num_prefix_hit_tokens=64,
            num_recomputed_tokens=11,
        )
    )
    metrics.request_finished(
        RequestStats(
            "r", FinishReason.LENGTH, 10, 21, 4, 1, 21, arrival_s=1.0, scheduled_s=1.5, first_token_s=2.0, finished_s=4.0
        )
    )
    metrics.request_finished(
        RequestStats(
            "r", FinishReason.ABORT, 10, 0, 0, 1, 21, arrival_s=1.0, scheduled_s=None, first_token_s=None, finished_s=4.0
        )
    )
    text = metrics.exposition().decode()
    label = '{engine="0",model_name="m"}'
    for line in (
        f"vllm:num_preemptions_total{label} 3.0",
        'pagestream:preemptions_total{engine="0",mode="swap",model_name="m"} 1.0',
        'pagestream:swapped_blocks_total{direction="in",engine="0",model_name="m"} 8.0',
        f"pagestream:copied_blocks_total{label} 9.0",
        f"vllm:prefix_cache_queries_total{label} 100.0",
        f"vllm:prefix_cache_hits_total{label} 64.0",
        f"vllm:prompt_tokens_recomputed_total{label} 11.0",
        f"vllm:e2e_request_latency_seconds_sum{label} 6.0",
        f"vllm:request_queue_time_seconds_sum{label} 0.5",
        f"vllm:request_prefill_time_seconds_sum{label} 0.5",
        f"vllm:request_decode_time_seconds_sum{label} 2.0",
        f"vllm:request_time_per_output_token_seconds_sum{label} 0.1",
    ):
        assert line in text, line
