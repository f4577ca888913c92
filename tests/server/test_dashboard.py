"""The dashboard and the rules ask for metrics that the server has, by labels that those have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import Live

DOCKER = Path(__file__).resolve().parents[2] / "docker"
FUNCTIONS = {
    "sum", "by", "rate", "max", "histogram_quantile", "and", "label_values", "le", "up", "or", "on", "ignoring", "avg", "min",
}  # fmt: skip
# By which dashboards made for vLLM ask.
KNOWN = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason num_requests_swapped kv_cache_usage_perc gpu_cache_usage_perc
cpu_cache_usage_perc engine_sleep_state lora_requests_info cache_config_info prefix_cache_queries_total prefix_cache_hits_total
external_prefix_cache_queries_total external_prefix_cache_hits_total mm_cache_queries_total mm_cache_hits_total
gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total num_preemptions_total prompt_tokens_total prompt_tokens_by_source_total
prompt_tokens_cached_total prompt_tokens_recomputed_total generation_tokens_total request_success_total corrupted_requests_total
admission_rejections_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket time_per_output_token_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
request_inference_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket request_max_num_generation_tokens_bucket request_params_n_bucket
request_params_max_tokens_bucket iteration_tokens_total_bucket request_prefill_kv_computed_tokens_bucket
kv_block_lifetime_seconds_bucket kv_block_idle_before_evict_seconds_bucket kv_block_reuse_gap_seconds_bucket
""".split()
HTTP = """
http_requests_total http_request_size_bytes_count http_response_size_bytes_count http_request_duration_seconds_bucket
http_request_duration_highr_seconds_bucket python_info process_cpu_seconds_total
""".split()
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def dashboard_expressions() -> list[str]:
    dashboard = json.loads((DOCKER / "grafana/dashboard.json").read_text(encoding="utf-8"))
    variables = [variable["query"] for variable in dashboard["templating"]["list"]]
    return variables + [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DOCKER / "prometheus/rules.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = sorted({*dashboard_expressions(), *(rule["expr"] for rule in rules())})
RECORDED = {rule["record"] for rule in rules() if "record" in rule}


def names_in(expression: str) -> Iterator[str]:
    bare = re.sub(r'"[^"]*"', "", re.sub(r"\[[^\]]*\]", "", expression))
    bare = re.sub(r"\{[^}]*\}|by \([^)]*\)|, model_name\)", "", bare)
    yield from (name for name in NAME.findall(bare) if name not in FUNCTIONS)


def labels_in(expression: str) -> set[str]:
    found = {label for group in re.findall(r"\{([^}]*)\}", expression) for label in re.findall(r"(\w+)\s*=~?\s*\"", group)}
    return found | {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}


@pytest.fixture(scope="module")
def samples(live: Live) -> dict[str, set[str]]:
    """Each exported sample's name and its labels, after a request that moved them."""
    assert live.complete(prompt="Hello", max_tokens=5).status_code == 200
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(live.client.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_name_that_dashboards_for_vllm_know_is_exported(samples: dict[str, set[str]]):
    assert not {f"vllm:{name}" for name in KNOWN} - samples.keys()
    assert all({"model_name", "engine"} <= samples[f"vllm:{name}"] for name in KNOWN)
    assert not set(HTTP) - samples.keys()


def test_every_expression_is_one_that_prometheus_reads():
    for expression in EXPRESSIONS:
        if not expression.startswith("label_values("):  # Grafana's own
            promql_parser.parse(expression.replace("$__rate_interval", "1m").replace("$model", ".*"))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_that_is_asked_for_is_exported_with_those_labels(samples: dict[str, set[str]], expression: str):
    names = set(names_in(expression))
    assert names or "up{" in expression
    labels = {"job"}
    for name in names - RECORDED:
        assert name in samples, f"{name} is not exported"
        labels |= samples[name]
    assert labels_in(expression) <= labels


def test_every_metric_of_ours_is_on_the_dashboard_or_in_a_rule(samples: dict[str, set[str]]):
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for expression in EXPRESSIONS for name in names_in(expression)}
    own = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples if name.startswith("pagestream:") and not name.endswith("_created")}
    assert own <= asked


def test_a_moved_counter_is_seen_to_move(live: Live):
    before = live.metric("vllm:generation_tokens_total")
    live.complete(prompt="Hello", max_tokens=7, ignore_eos=True)
    assert live.metric("vllm:generation_tokens_total") == before + 7


def test_compose_mounts_files_that_are_there():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    mounts = [volume for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    assert mounts
    assert all((DOCKER / volume.partition(":")[0]).exists() for volume in mounts)
