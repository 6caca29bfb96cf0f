"""The metrics that the services export, as their code declares them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from moebius_controller.metrics import ControllerMetrics
from moebius_gateway.admission.metrics import AdmissionMetrics
from moebius_gateway.auth.key_ring import KeyRing
from moebius_gateway.metrics import GatewayMetrics
from moebius_gateway.workers.metrics import DispatcherMetrics
from moebius_proto.worker.v1 import worker_pb2
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.state import WorkerState
from moebius_worker.metrics import RequestMetrics, WorkerCollector


@dataclass(frozen=True, slots=True)
class Entry:
    """A metric under the name that Prometheus has; a histogram under that without `_bucket`."""

    name: str
    # counter, gauge, histogram.
    type: str
    labels: tuple[str, ...]
    about: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a query can use."""
        if self.type != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))

    def labels_of(self, series: str) -> frozenset[str]:
        return frozenset(self.labels) | ({"le"} if series.endswith("_bucket") else frozenset())


def gateway() -> list[Entry]:
    registry = CollectorRegistry()
    for metrics in (GatewayMetrics, DispatcherMetrics, AdmissionMetrics):
        metrics(registry)
    KeyRing(None, registry)
    return _entries(registry)


def worker() -> list[Entry]:
    """Its own names, and those of vLLM, which exist once it knows its model."""
    registry = CollectorRegistry()
    state = WorkerState(pid=1, model=worker_pb2.Model(id="m"))
    registry.register(WorkerCollector(state, Exchange(state, RequestMetrics(registry))))
    return _entries(registry)


def controller() -> list[Entry]:
    registry = CollectorRegistry()
    ControllerMetrics(registry)
    return _entries(registry)


def everything() -> dict[str, Entry]:
    """By each name that a query can use."""
    entries = (*gateway(), *worker(), *controller())
    return {series: entry for entry in entries for series in entry.series}


def _entries(registry: CollectorRegistry) -> list[Entry]:
    # There is no public way to the labels of a metric that has no series yet.
    collectors: list[Any] = list(registry._collector_to_names)
    found = [entry for collector in collectors for entry in _of(collector)]
    own = [entry for entry in found if entry.name.startswith(("moebius_", "vllm:"))]
    return sorted(own, key=lambda entry: entry.name)


def _of(collector: Any) -> Iterator[Entry]:
    own = getattr(collector, "_labelnames", None)
    for family in collector.collect():
        labels = family._labelnames if own is None else own
        name = family.name + ("_total" if family.type == "counter" else "")
        yield Entry(name, family.type, tuple(labels), family.documentation)
