"""What dashboards of other servers and of earlier versions look for, at no cost but when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

OLD_NAMES = {
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries": "vllm:prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits": "vllm:prefix_cache_hits",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
}
# Caches that this server does not have.
NEVER_COUNTED = ("vllm:external_prefix_cache_queries", "vllm:external_prefix_cache_hits", "vllm:mm_cache_queries", "vllm:mm_cache_hits")


class OldNames(Collector):
    """The same numbers a second time, under the names that they had in earlier versions of vLLM."""

    def __init__(self, families: Mapping[str, MetricWrapperBase]):
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for old, new in OLD_NAMES.items():
            for family in self._families[new].collect():
                renamed = Metric(old, f"An older name of {new}.", family.type)
                renamed.samples = [sample._replace(name=sample.name.replace(new, old, 1)) for sample in family.samples]
                yield renamed


def declare_absent(registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
    """Say of what this server lacks that there is none of it, so that a panel over many servers has no hole."""
    for name in NEVER_COUNTED:
        Counter(name, "Always 0: there is no such cache.", labels, registry=registry).labels(**labels)
    sleep = Gauge("vllm:engine_sleep_state", "This engine never sleeps.", (*labels, "sleep_state"), registry=registry)
    for state in ("awake", "weights_offloaded", "discard_all"):
        sleep.labels(**labels, sleep_state=state).set(state == "awake")
    adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    info = Gauge("vllm:lora_requests_info", "No adapters are served.", (*labels, *adapters), registry=registry)
    info.labels(**labels, **adapters).set(0)
