"""Prometheus metrics under vLLM's names, so that existing dashboards work; what vLLM has no name for is called `pagestream:`.

The engine's thread counts, the event loop scrapes: each metric has a lock of its own and nothing here waits for anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase

from pagestream.engine import FinishReason, RequestStats, StepStats
from pagestream.server.metric_names import OldNames, declare_absent

if TYPE_CHECKING:
    from pagestream.engine import AsyncLLMEngine
    from pagestream.server.tracing import Tracing

Metric = TypeVar("Metric", bound=MetricWrapperBase)

# fmt: off
FIRST_TOKEN_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
BETWEEN_TOKENS_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
NUM_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
NUM_ANSWERS = (1, 2, 5, 10, 20)
AGE_S = (.001, .005, .01, .05, .1, .5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
HTTP_S = (.01, .025, .05, .075, .1, .25, .5, .75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)
STEP_S = (.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5)
# fmt: on
STEP_PARTS = ("schedule", "forward", "sample", "detokenize")


class HttpMetrics(NamedTuple):
    """Of one route, method and status."""

    requests: Counter
    seconds: Histogram
    request_bytes: Summary
    response_bytes: Summary


class Metrics:
    """One server's numbers, in a registry of their own.  Implements EngineListener; gauges are read when asked for."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._labels = {"model_name": model_name, "engine": "0"}
        self._families: dict[str, MetricWrapperBase] = {}
        self._engine: AsyncLLMEngine | None = None
        self.tracing: Tracing | None = None  # told of each request's end
        self._make_gauges()
        self._make_counters()
        self._make_histograms()
        self._make_http()
        declare_absent(self.registry, self._labels)
        self.registry.register(OldNames(self._families))

    def watch(self, engine: AsyncLLMEngine) -> None:
        """From here on the gauges are this engine's."""
        self._engine = engine
        facts = engine.cache_facts
        names = (*self._labels, *facts)
        config = Gauge("vllm:cache_config_info", "How the KV cache was set up; always 1.", names, registry=self.registry)
        config.labels(**self._labels, **facts).set(1)

    def _labelled(self, name: str, family: Metric) -> Metric:
        self._families[name] = family
        return family.labels(**self._labels)

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._labelled(name, Gauge(name, text, self._labels, registry=self.registry))

    def _counter(self, name: str, text: str) -> Counter:
        return self._labelled(name, Counter(name, text, self._labels, registry=self.registry))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._labelled(name, Histogram(name, text, self._labels, registry=self.registry, buckets=buckets))

    def _counters_by(self, label: str, name: str, text: str, values: list[str]) -> dict[str, Counter]:
        """One child for each value, there from the start, so that a rate over the first event is right."""
        family = Counter(name, text, (*self._labels, label), registry=self.registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def _make_gauges(self) -> None:
        self.num_running = self._gauge("vllm:num_requests_running", "Requests in the running queue.")
        self.num_waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait to be scheduled.")
        self.num_swapped = self._gauge("vllm:num_requests_swapped", "Requests whose blocks are in the swap pool.")
        self.kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is full.")
        self.num_blocks = self._gauge("pagestream:kv_blocks", "KV blocks of the pool.")
        self.num_used_blocks = self._gauge("pagestream:kv_blocks_used", "KV blocks that somebody holds.")
        self.num_swap_blocks = self._gauge("pagestream:swap_blocks", "Blocks of the swap pool.")
        self.num_used_swap_blocks = self._gauge("pagestream:swap_blocks_used", "Blocks of the swap pool that somebody holds.")
        self.swap_usage = self._gauge("vllm:cpu_cache_usage_perc", "Share of the swap pool in use; 1 is full.")
        waiting = Gauge(
            "vllm:num_requests_waiting_by_reason", "Those that wait, by what for.", (*self._labels, "reason"), registry=self.registry
        )
        self.num_waiting_by = {reason: waiting.labels(**self._labels, reason=reason) for reason in ("capacity", "preempted")}
        self.stalled_s = self._gauge("pagestream:stalled_seconds", "How long no step has ended though there is work.")

    def _make_counters(self) -> None:
        self.preemptions = self._counter("vllm:num_preemptions", "Preemptions of running requests.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens computed or found in the cache.")
        self.prompt_tokens_cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in the cache.")
        self.recomputed_tokens = self._counter("vllm:prompt_tokens_recomputed", "Tokens computed again after a preemption.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.prefix_queries = self._counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.prefix_hits = self._counter("vllm:prefix_cache_hits", "Tokens found there.")
        sources = ["local_compute", "local_cache_hit"]
        self.prompt_tokens_by_source = self._counters_by(
            "source", "vllm:prompt_tokens_by_source", "Prompt tokens, by where their keys and values came from.", sources
        )
        self.corrupted = self._counter("vllm:corrupted_requests", "Sequences whose logits were no finite numbers.")
        self.failed_sequences = self._counter("pagestream:failed_sequences", "Sequences that a step could not compute or judge.")
        self.compilations = self._counter(
            "pagestream:kernel_compilations_after_ready", "Kernels compiled while requests were waiting for them."
        )
        self.resumptions = self._counters_by(
            "cause", "pagestream:resumptions", "Streams taken up again, by what had cut them off.", ["reader", "restart"]
        )
        self.copied_blocks = self._counter("pagestream:copied_blocks", "KV blocks copied on write.")
        reasons = [reason.value for reason in FinishReason]
        self.finished = self._counters_by(
            "finished_reason", "vllm:request_success", "Admitted requests, by how they ended.", reasons
        )
        causes = ["queue_full", "queue_tokens", "hopeless", "draining", "loading"]
        self.rejections = self._counters_by("reason", "vllm:admission_rejections", "Requests refused for want of room.", causes)
        self.swapped_blocks = self._counters_by("direction", "pagestream:swapped_blocks", "KV blocks moved.", ["out", "in"])
        modes = ["recompute", "swap"]
        self.preemptions_by_mode = self._counters_by(
            "mode", "pagestream:preemptions", "Preemptions, by what became of the blocks.", modes
        )

    def _make_histograms(self) -> None:
        self.first_token_s = self._histogram("vllm:time_to_first_token_seconds", "From arrival.", FIRST_TOKEN_S)
        self.between_tokens_s = self._histogram(
            "vllm:inter_token_latency_seconds", "Between tokens of one answer.", BETWEEN_TOKENS_S
        )
        self.per_token_s = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of a request, after its first.", BETWEEN_TOKENS_S
        )
        self.e2e_s = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to end.", REQUEST_S)
        self.queue_s = self._histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", REQUEST_S)
        self.inference_s = self._histogram("vllm:request_inference_time_seconds", "From the first step to the end.", REQUEST_S)
        self.prefill_s = self._histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token.", REQUEST_S
        )
        self.decode_s = self._histogram("vllm:request_decode_time_seconds", "From the first token to the end.", REQUEST_S)
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", NUM_TOKENS)
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request.", NUM_TOKENS
        )
        self.computed_prompt_tokens = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that the cache did not have.", NUM_TOKENS
        )
        self.request_n = self._histogram("vllm:request_params_n", "n of a request.", NUM_ANSWERS)
        self.request_max_tokens = self._histogram("vllm:request_params_max_tokens", "max_tokens of a request.", NUM_TOKENS)
        self.step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens computed in one step.", STEP_TOKENS)
        self.longest_answer = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest answer.", NUM_TOKENS
        )
        # Of every so many-th block: see the engine's BlockAges.
        self.block_lifetime_s = self._histogram(
            "vllm:kv_block_lifetime_seconds", "Of a cached block, until it was given to somebody else.", AGE_S
        )
        self.block_idle_s = self._histogram(
            "vllm:kv_block_idle_before_evict_seconds", "Of the same blocks, since nobody held them.", AGE_S
        )
        self.block_reuse_gap_s = self._histogram(
            "vllm:kv_block_reuse_gap_seconds", "How long a cached block lay idle until it was found again.", AGE_S
        )
        family = Histogram(
            "pagestream:step_seconds", "One step, by part.", (*self._labels, "part"), registry=self.registry, buckets=STEP_S
        )
        self.step_s = {part: family.labels(**self._labels, part=part) for part in STEP_PARTS}

    def _make_http(self) -> None:
        self._http_labelled: dict[tuple[str, str, int], HttpMetrics] = {}
        http = ("handler", "method", "status")
        self.http_requests = Counter("http_requests", "HTTP requests by route and status.", http, registry=self.registry)
        self.http_seconds = Histogram(
            "http_request_duration_seconds",
            "Until the response's end.",
            http[:2],
            registry=self.registry,
            buckets=(0.01, 0.1, 0.5, 1, 5, 20, 60, 300),
        )
        self.http_fine_seconds = Histogram(
            "http_request_duration_highr_seconds", "The same of all routes together, finer.", registry=self.registry, buckets=HTTP_S
        )
        self.http_request_bytes = Summary("http_request_size_bytes", "Bodies of requests.", http[:1], registry=self.registry)
        self.http_response_bytes = Summary("http_response_size_bytes", "Bodies of responses.", http[:1], registry=self.registry)

    # EngineListener

    def step_done(self, stats: StepStats) -> None:
        self.step_tokens.observe(stats.num_scheduled_tokens)
        times = (stats.schedule_s, stats.forward_s, stats.sample_s, stats.detokenize_s)
        for part, seconds in zip(STEP_PARTS, times, strict=True):
            self.step_s[part].observe(seconds)
        for histogram, ages in (
            (self.block_lifetime_s, stats.block_lifetimes_s),
            (self.block_idle_s, stats.block_idle_times_s),
            (self.block_reuse_gap_s, stats.block_reuse_gaps_s),
        ):
            for age_s in ages:
                histogram.observe(age_s)
        for mode, count in (("recompute", stats.num_preempted_recompute), ("swap", stats.num_preempted_swap)):
            if count:
                self.preemptions.inc(count)
                self.preemptions_by_mode[mode].inc(count)
        for counter, count in (
            (self.swapped_blocks["out"], stats.num_swapped_out_blocks),
            (self.swapped_blocks["in"], stats.num_swapped_in_blocks),
            (self.copied_blocks, stats.num_copied_blocks),
            (self.prefix_queries, stats.num_prefix_queried_tokens),
            (self.prefix_hits, stats.num_prefix_hit_tokens),
            (self.recomputed_tokens, stats.num_recomputed_tokens),
            (self.failed_sequences, stats.num_failed),
            (self.corrupted, stats.num_corrupted),
        ):
            if count:
                counter.inc(count)

    def prompt_computed(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        self.prompt_tokens.inc(num_prompt_tokens)
        self.prompt_tokens_cached.inc(num_cached_tokens)
        self.prompt_tokens_by_source["local_compute"].inc(num_prompt_tokens - num_cached_tokens)
        self.prompt_tokens_by_source["local_cache_hit"].inc(num_cached_tokens)
        self.computed_prompt_tokens.observe(num_prompt_tokens - num_cached_tokens)

    def first_token(self, seconds_since_arrival: float) -> None:
        self.first_token_s.observe(seconds_since_arrival)

    def tokens_emitted(self, num_tokens: int, seconds_since_last: float | None) -> None:
        self.generation_tokens.inc(num_tokens)
        if seconds_since_last is not None:
            self.between_tokens_s.observe(seconds_since_last)

    def request_finished(self, stats: RequestStats) -> None:
        if self.tracing is not None:
            self.tracing.request_finished(stats)
        self.finished[stats.finish_reason.value].inc()
        self.e2e_s.observe(stats.finished_s - stats.arrival_s)
        self.request_prompt_tokens.observe(stats.num_prompt_tokens)
        self.request_generation_tokens.observe(stats.num_output_tokens)
        self.longest_answer.observe(stats.max_answer_tokens)
        self.request_n.observe(stats.n)
        self.request_max_tokens.observe(stats.max_tokens)
        if stats.scheduled_s is None:
            return
        self.queue_s.observe(stats.scheduled_s - stats.arrival_s)
        self.inference_s.observe(stats.finished_s - stats.scheduled_s)
        if stats.first_token_s is None:
            return
        self.prefill_s.observe(stats.first_token_s - stats.scheduled_s)
        self.decode_s.observe(stats.finished_s - stats.first_token_s)
        # Of n answers that ran side by side, the mean answer's.
        num_after_first = stats.num_output_tokens / stats.n - 1
        if num_after_first > 0:
            self.per_token_s.observe((stats.finished_s - stats.first_token_s) / num_after_first)

    def request_rejected(self, reason: str) -> None:
        self.rejections[reason].inc()

    def kernel_compiled(self) -> None:
        self.compilations.inc()

    # HTTP

    def http_request(
        self, handler: str, method: str, status: int, seconds: float, request_bytes: int = 0, response_bytes: int = 0
    ) -> None:
        key = (handler, method, status)
        if (labelled := self._http_labelled.get(key)) is None:  # looked up once: the labels are few, and a flood of refusals is not
            labelled = self._http_labelled[key] = HttpMetrics(
                self.http_requests.labels(handler, method, str(status)), self.http_seconds.labels(handler, method),
                self.http_request_bytes.labels(handler), self.http_response_bytes.labels(handler),
            )  # fmt: skip
        labelled.requests.inc()
        labelled.seconds.observe(seconds)
        self.http_fine_seconds.observe(seconds)
        labelled.request_bytes.observe(request_bytes)
        labelled.response_bytes.observe(response_bytes)

    def exposition(self) -> bytes:
        """All of it as Prometheus reads it, with the gauges of this moment."""
        if self._engine is not None:
            now = self._engine.stats()
            self.num_running.set(now.num_running)
            self.num_waiting.set(now.num_waiting)
            self.num_swapped.set(now.num_swapped)
            self.num_waiting_by["capacity"].set(now.num_waiting - now.num_waiting_preempted)
            self.num_waiting_by["preempted"].set(now.num_waiting_preempted)
            self.num_swap_blocks.set(now.num_swap_blocks)
            self.num_used_swap_blocks.set(now.num_used_swap_blocks)
            self.swap_usage.set(now.num_used_swap_blocks / now.num_swap_blocks if now.num_swap_blocks else 0.0)
            self.num_blocks.set(now.num_blocks)
            self.num_used_blocks.set(now.num_used_blocks)
            self.stalled_s.set(self._engine.stalled_s)
            self.kv_usage.set(now.num_used_blocks / now.num_blocks if now.num_blocks else 0.0)
        return generate_latest(self.registry)
