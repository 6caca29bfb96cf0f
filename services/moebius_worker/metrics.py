"""Prometheus metrics of a worker: its own names (moebius_worker_), and those of vLLM that autoscalers,
inference gateways and community dashboards read.

Gauges and counters are read from the worker's state when they are scraped; only latencies are recorded.
"""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moebius_common.address import split_address
from moebius_proto.worker.v1 import worker_pb2
from moebius_worker.front.state import WorkerState

_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


class RequestMetrics:
    """Latencies and ends of requests, from their arrival at the front."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["model_name"]
        self._first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From submit to first token.",
            labels,
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self._next_token = Histogram(
            "vllm:inter_token_latency_seconds",
            "From token to token.",
            labels,
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._request = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From submit to the last token.",
            labels,
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self._finished = Counter(
            "vllm:request_success",
            "Finished requests.",
            [*labels, "finished_reason"],
            registry=registry,
        )
        self._failed = Counter(
            "moebius_worker_request_failures",
            "Failed and refused requests, by the reason that the gateway was told.",
            ["reason"],
            registry=registry,
        )

    def tokens(self, model: str, seconds: float, *, first: bool) -> None:
        """A step brought tokens for a request, `seconds` after its submit or the tokens before."""
        (self._first_token if first else self._next_token).labels(model).observe(seconds)

    def finished(self, model: str, seconds: float, reason: worker_pb2.FinishReason) -> None:
        """A request got its last token `seconds` after its submit."""
        self._request.labels(model).observe(seconds)
        name = worker_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
        self._finished.labels(model, name).inc()

    def failed(self, reason: worker_pb2.Reason) -> None:
        self._failed.labels(worker_pb2.Reason.Name(reason).removeprefix("REASON_").lower()).inc()


class Traffic(Protocol):
    """What the front has on its hands."""

    @property
    def in_flight(self) -> int: ...

    @property
    def gateways(self) -> int: ...


class WorkerCollector(Collector):
    """Everything that is known without counting."""

    def __init__(self, state: WorkerState, traffic: Traffic) -> None:
        self._state = state
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        yield from self._own()
        if self._state.model is not None:
            yield from self._vllm(self._state.model)

    def _own(self) -> Iterator[Metric]:
        state, stats, totals = self._state, self._state.stats, self._state.totals()
        states = GaugeMetricFamily(
            "moebius_worker_state", "1 for the state that the worker is in.", labels=["state"]
        )
        for name, value in worker_pb2.State.items():
            if value != worker_pb2.STATE_UNSPECIFIED:
                states.add_metric([name.removeprefix("STATE_").lower()], float(value == state.state))
        yield states
        pages = GaugeMetricFamily("moebius_worker_kv_pages", "Pages of the KV cache.", labels=["kind"])
        pages.add_metric(["used"], stats.kv_pages_used)
        pages.add_metric(["cached"], stats.kv_pages_cached)
        pages.add_metric(["total"], stats.kv_pages_total)
        yield pages
        gauges: tuple[tuple[str, float, str], ...] = (
            ("requests_running", stats.running, "Requests that hold a place in the engine."),
            ("requests_waiting", stats.waiting, "Requests that wait in the engine for a place."),
            ("requests_in_flight", self._traffic.in_flight, "Requests that gateways wait for."),
            ("gateways", self._traffic.gateways, "Gateways that are attached."),
            ("engine_silence_seconds", state.silence, "Age of the engine's last sign of progress."),
        )
        for name, level, about in gauges:
            yield GaugeMetricFamily(f"moebius_worker_{name}", about, value=level)
        for name, value, about in (
            ("engine_restarts", state.restarts, "Engine processes started after the first."),
            ("engine_steps", totals.step, "Engine steps."),
            ("prompt_tokens", totals.prompt_tokens, "Tokens submitted, those generated elsewhere included."),
            ("generated_tokens", totals.generated_tokens, "Tokens generated."),
            ("cached_tokens", totals.cached_tokens, "Prompt tokens found in the prefix cache."),
            ("preemptions", totals.preemptions, "Requests that lost their pages to another."),
            ("late_compilations", totals.late_compilations, "Kernels compiled while serving."),
        ):
            yield CounterMetricFamily(f"moebius_worker_{name}", about, value=value)
        if state.model is not None:
            yield from _plan(state.model.plan)

    def _vllm(self, model: worker_pb2.Model) -> Iterator[Metric]:
        stats, totals = self._state.stats, self._state.totals()
        usage = stats.kv_pages_used / stats.kv_pages_total if stats.kv_pages_total else 0.0
        for name, value, about in (
            ("num_requests_running", stats.running, "Requests that hold a place in the engine."),
            ("num_requests_waiting", stats.waiting, "Requests that wait in the engine for a place."),
            ("kv_cache_usage_perc", usage, "Part of the KV cache that requests use; 1 is all of it."),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", about, labels=["model_name"])
            gauge.add_metric([model.id], value)
            yield gauge
        for name, value, about in (
            ("prompt_tokens", totals.prompt_tokens, "Tokens submitted, those generated elsewhere included."),
            ("generation_tokens", totals.generated_tokens, "Tokens generated."),
            ("prefix_cache_queries", totals.prompt_tokens, "Tokens looked up in the prefix cache."),
            ("prefix_cache_hits", totals.cached_tokens, "Tokens found there."),
            ("num_preemptions", totals.preemptions, "Requests that lost their pages to another."),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", about, labels=["model_name"])
            counter.add_metric([model.id], value)
            yield counter
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; the labels tell the shape of the KV cache.",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        config.add_metric([model.id, str(model.page_size), str(stats.kv_pages_total)], 1)
        yield config


def _plan(plan: worker_pb2.KernelPlan) -> Iterator[Metric]:
    chosen = GaugeMetricFamily(
        "moebius_worker_kernel_choices",
        "Operations, with their shapes and token counts, that a backend computes.",
        labels=["backend"],
    )
    for backend, count in plan.backends.items():
        chosen.add_metric([backend], count)
    yield chosen
    rejected = GaugeMetricFamily(
        "moebius_worker_kernel_rejections",
        "Those for which a backend was rejected, by the gate of the preflight that it failed at.",
        labels=["backend", "gate"],
    )
    for one in plan.rejections:
        rejected.add_metric([one.backend, one.gate], one.count)
    yield rejected
    excluded = GaugeMetricFamily(
        "moebius_worker_kernel_excluded",
        "1 for each backend that is not used, since it was told so or an engine died of it.",
        labels=["backend"],
    )
    for backend in plan.excluded:
        excluded.add_metric([backend], 1)
    yield excluded


def serve_metrics(address: str, registry: CollectorRegistry) -> int:
    """Answers scrapes in a thread of their own; returns the port. Raises OSError if it is taken."""
    host, port = split_address(address)
    server, _ = start_http_server(port, host, registry)
    return server.server_port
