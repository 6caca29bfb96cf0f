"""Prometheus metrics of a worker: its own names (moebius_worker_), and those of vLLM that autoscalers,
inference gateways and community dashboards read.

Gauges and counters are read from the worker's state when they are scraped; only latencies are recorded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moebius_common.build_info import tell_build
from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.front.state import LEVEL_CHANGED, WorkerState

_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300)
_NEXT_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
_REQUEST_TOKENS = tuple(float(4**power) for power in range(10))
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
_STEP_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512)
_STEP_TOKENS = tuple(float(2**power) for power in range(15))
# Of the reasons in the protocol, those that workers give.
_REASONS = [
    name
    for name, value in worker_pb2.Reason.items()
    if value not in (worker_pb2.REASON_UNSPECIFIED, worker_pb2.REASON_POISONED)
]
# Why an engine is started again.
_RESTARTS = ("ENGINE_DEAD", "ENGINE_STALLED", "GPU_FAULT", LEVEL_CHANGED)


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What became of a request.

    Seconds until its first step, from there to its first token, from there to its last. Tokens of the prompt,
    and those that were generated here.
    """

    prompt_tokens: int
    generated_tokens: int
    queued: float
    prefill: float
    decode: float


class RequestMetrics:
    """What passes the front: requests, from their arrival there, and the engine's steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tell_build("worker", registry)

        def of_requests(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", about, ["model_name"], buckets=buckets, registry=registry)

        def of_steps(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"moebius_worker_step_{name}", about, buckets=buckets, registry=registry)

        first, later, whole = _FIRST_TOKEN_SECONDS, _NEXT_TOKEN_SECONDS, _REQUEST_SECONDS
        self._first_token = of_requests("time_to_first_token_seconds", "From submit to first token", first)
        self._next_token = of_requests("inter_token_latency_seconds", "From token to token", later)
        self._request = of_requests("e2e_request_latency_seconds", "From submit to the last token", whole)
        self._queued = of_requests("request_queue_time_seconds", "From submit to the first step", first)
        self._prefill = of_requests(
            "request_prefill_time_seconds", "From the first step to the first token", first
        )
        self._decode = of_requests("request_decode_time_seconds", "From the first token to the last", whole)
        self._prompt = of_requests(
            "request_prompt_tokens", "Tokens of the prompts of finished requests", _REQUEST_TOKENS
        )
        self._generated = of_requests(
            "request_generation_tokens", "Tokens that finished requests generated here", _REQUEST_TOKENS
        )
        self._finished = Counter(
            "vllm:request_success", "Finished requests", ["model_name", "finished_reason"], registry=registry
        )
        self._failed = Counter(
            "moebius_worker_request_failures",
            "Failed and refused requests, by the reason that the gateway was told",
            ["reason"],
            registry=registry,
        )
        for reason in _REASONS:
            self._failed.labels(reason.removeprefix("REASON_"))
        self._step_seconds = of_steps("seconds", "From an engine step's schedule to its end", _STEP_SECONDS)
        self._step_requests = of_steps("requests", "Requests that a step computed", _STEP_REQUESTS)
        self._step_tokens = of_steps(
            "tokens", "Tokens that a step computed, prefill and decode together", _STEP_TOKENS
        )

    def serves(self, model: str) -> None:
        """Makes the model's series exist."""
        for metric in (
            *(self._first_token, self._next_token, self._request, self._queued, self._prefill, self._decode),
            *(self._prompt, self._generated),
        ):
            metric.labels(model)
        for reason in ("stop", "length"):
            self._finished.labels(model, reason)

    def tokens(self, model: str, seconds: float, *, first: bool) -> None:
        """A step brought tokens for a request, `seconds` after its submit or the tokens before."""
        (self._first_token if first else self._next_token).labels(model).observe(seconds)

    def finished(self, model: str, request: FinishedRequest, reason: worker_pb2.FinishReason) -> None:
        for metric, value in (
            (self._prompt, request.prompt_tokens),
            (self._generated, request.generated_tokens),
            (self._queued, request.queued),
            (self._prefill, request.prefill),
            (self._decode, request.decode),
            (self._request, request.queued + request.prefill + request.decode),
        ):
            metric.labels(model).observe(value)
        name = worker_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
        self._finished.labels(model, name).inc()

    def failed(self, reason: worker_pb2.Reason) -> None:
        self._failed.labels(worker_pb2.Reason.Name(reason).removeprefix("REASON_")).inc()

    def step(self, step: engine_pb2.ComputedStep) -> None:
        self._step_seconds.observe(step.seconds)
        self._step_requests.observe(step.requests)
        self._step_tokens.observe(step.tokens)


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
            "moebius_worker_state", "1 for the state that the worker is in", labels=["state"]
        )
        for name, value in worker_pb2.State.items():
            if value != worker_pb2.STATE_UNSPECIFIED:
                states.add_metric([name.removeprefix("STATE_")], float(value == state.state))
        yield states
        about = "Pages of the KV cache: used, cached, total"
        pages = GaugeMetricFamily("moebius_worker_kv_pages", about, labels=["kind"])
        pages.add_metric(["used"], stats.kv_pages_used)
        pages.add_metric(["cached"], stats.kv_pages_cached)
        pages.add_metric(["total"], stats.kv_pages_total)
        yield pages
        gauges: tuple[tuple[str, float, str], ...] = (
            ("requests_running", stats.running, "Requests that hold a place in the engine"),
            ("requests_waiting", stats.waiting, "Requests that wait in the engine for a place"),
            ("requests_in_flight", self._traffic.in_flight, "Requests that gateways wait for"),
            ("gateways", self._traffic.gateways, "Gateways that are attached"),
            ("experts_idle", state.experts.idle, "Experts of all layers that got no token in these steps"),
            ("engine_silence_seconds", state.silence, "Age of the engine's last sign of progress"),
            ("fallback_level", state.fallback_level, "Level that the engine runs on; 0 is as configured"),
        )
        for name, level, about in gauges:
            yield GaugeMetricFamily(f"moebius_worker_{name}", about, value=level)
        for name, value, about in (
            ("prompt_tokens", totals.prompt_tokens, "Tokens submitted, those generated elsewhere included"),
            ("generated_tokens", totals.generated_tokens, "Tokens generated"),
            ("cached_tokens", totals.cached_tokens, "Prompt tokens found in the prefix cache"),
            ("preemptions", totals.preemptions, "Requests that lost their pages to another"),
            ("late_compilations", totals.late_compilations, "Kernels compiled while serving"),
        ):
            yield CounterMetricFamily(f"moebius_worker_{name}", about, value=value)
        restarts = CounterMetricFamily(
            "moebius_worker_engine_restarts",
            "Engine processes started after the first, by why the one before ended",
            labels=["reason"],
        )
        for reason in sorted({*_RESTARTS, *state.restarts_by}):
            restarts.add_metric([reason], state.restarts_by[reason])
        yield restarts
        yield from _model(state.model or worker_pb2.Model())
        imbalance = GaugeMetricFamily(
            "moebius_worker_expert_imbalance",
            "Of each layer with experts, the tokens of its busiest expert over those of a mean one, in steps "
            "that were watched",
            labels=["layer"],
        )
        for layer, ratio in enumerate(state.experts.imbalance):
            imbalance.add_metric([str(layer)], ratio)
        yield imbalance

    def _vllm(self, model: worker_pb2.Model) -> Iterator[Metric]:
        stats, totals = self._state.stats, self._state.totals()
        usage = stats.kv_pages_used / stats.kv_pages_total if stats.kv_pages_total else 0.0
        for name, value, about in (
            ("num_requests_running", stats.running, "Requests that hold a place in the engine"),
            ("num_requests_waiting", stats.waiting, "Requests that wait in the engine for a place"),
            ("kv_cache_usage_perc", usage, "Part of the KV cache that requests use; 1 is all of it"),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", about, labels=["model_name"])
            gauge.add_metric([model.id], value)
            yield gauge
        for name, value, about in (
            ("prompt_tokens", totals.prompt_tokens, "Tokens submitted, those generated elsewhere included"),
            ("generation_tokens", totals.generated_tokens, "Tokens generated"),
            ("prefix_cache_queries", totals.prompt_tokens, "Tokens looked up in the prefix cache"),
            ("prefix_cache_hits", totals.cached_tokens, "Tokens found there"),
            ("num_preemptions", totals.preemptions, "Requests that lost their pages to another"),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", about, labels=["model_name"])
            counter.add_metric([model.id], value)
            yield counter
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; the labels tell the shape of the KV cache",
            labels=["model_name", "block_size", "num_gpu_blocks"],
        )
        config.add_metric([model.id, str(model.page_size), str(stats.kv_pages_total)], 1)
        yield config


def _model(model: worker_pb2.Model) -> Iterator[Metric]:
    info = GaugeMetricFamily(
        "moebius_worker_model_info",
        "1 once the model is loaded; the labels tell what and where it is",
        labels=["model_name", "architecture", "dtype", "device"],
    )
    if model.id:
        info.add_metric([model.id, model.architecture, model.dtype, model.device], 1)
    yield info
    chosen = GaugeMetricFamily(
        "moebius_worker_kernel_choices",
        "Operations, with their shapes and token counts, that a backend computes",
        labels=["backend"],
    )
    for backend, count in model.plan.backends.items():
        chosen.add_metric([backend], count)
    yield chosen
    rejected = GaugeMetricFamily(
        "moebius_worker_kernel_rejections",
        "Those for which a backend was rejected, by the gate of the preflight that it failed at",
        labels=["backend", "gate"],
    )
    for one in model.plan.rejections:
        rejected.add_metric([one.backend, one.gate], one.count)
    yield rejected
    excluded = GaugeMetricFamily(
        "moebius_worker_kernel_excluded",
        "1 for each backend that is not used, since it was told so or an engine died of it",
        labels=["backend"],
    )
    for backend in model.plan.excluded:
        excluded.add_metric([backend], 1)
    yield excluded
