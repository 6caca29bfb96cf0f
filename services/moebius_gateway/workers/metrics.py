"""What the gateway's worker side counts."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from moebius_gateway.journal import DEATHS
from moebius_gateway.types import Reason
from moebius_gateway.workers.view import WorkerState, WorkerView

REJOINED = "REJOINED"


class DispatcherMetrics:
    """Series of one dispatcher in one registry; those without a worker label exist from the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.workers = Gauge(
            "moebius_gateway_workers", "Configured workers by state", ["state"], registry=registry
        )
        self.worker_up = Gauge(
            "moebius_gateway_worker_up", "1 while the worker can take requests", ["worker"], registry=registry
        )
        self.worker_streams = Gauge(
            "moebius_gateway_worker_streams",
            "Generations that run on the worker",
            ["worker"],
            registry=registry,
        )
        self.waiting = Gauge(
            "moebius_gateway_streams_waiting", "Generations that wait for a worker", registry=registry
        )
        self.recoveries = Counter(
            "moebius_gateway_recoveries",
            "Generations continued after a worker's failure, by its reason; REJOINED: after quarantine",
            ["reason"],
            registry=registry,
        )
        self.strikes = Counter(
            "moebius_gateway_strikes", "Worker deaths of which a generation is suspected", registry=registry
        )
        self.poisoned = Counter(
            "moebius_gateway_poisoned", "Generations failed because they kill engines", registry=registry
        )
        self.ejections = Counter(
            "moebius_gateway_ejections",
            "Times that a worker was ejected after repeated deaths",
            ["worker"],
            registry=registry,
        )
        self.reconnects = Counter(
            "moebius_gateway_attach_reconnects",
            "Times that a worker's stream was opened again after it was lost",
            ["worker"],
            registry=registry,
        )
        for state in WorkerState:
            self.workers.labels(state.value)
        for reason in (*sorted(DEATHS), Reason.OVERLOADED, Reason.DRAINING, Reason.NOT_READY, REJOINED):
            self.recoveries.labels(reason)

    def add_worker(self, address: str) -> None:
        """Makes the worker's series exist from the moment that it is known."""
        for metric in (self.worker_up, self.worker_streams, self.ejections, self.reconnects):
            metric.labels(address)

    def set_workers(self, views: Sequence[WorkerView]) -> None:
        for state in WorkerState:
            self.workers.labels(state.value).set(sum(view.state is state for view in views))
        for view in views:
            up = view.state is WorkerState.READY and view.model is not None
            self.worker_up.labels(view.address).set(up)
