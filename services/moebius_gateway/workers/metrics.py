"""What the gateway's worker side counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moebius_gateway.journal import DEATHS
from moebius_gateway.types import Reason
from moebius_gateway.workers.view import WorkerState, WorkerView

REJOINED = "REJOINED"
ROUTING_SECONDS = (0.000025, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.0025, 0.01)


class DispatcherMetrics:
    """Series of one dispatcher in one registry; those without a worker label exist from the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.workers = Gauge(
            "moebius_gateway_workers", "Configured workers by state", ["state"], registry=registry
        )
        self.worker_up = Gauge(
            "moebius_gateway_worker_up", "1 while the worker can take requests", ["worker"], registry=registry
        )
        self.worker_on_trial = Gauge(
            "moebius_gateway_worker_on_trial",
            "1 while the worker, after repeated deaths, gets one request at a time",
            ["worker"],
            registry=registry,
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
        self.routing = Histogram(
            "moebius_gateway_routing_seconds",
            "Choosing a worker, waits for one not counted",
            buckets=ROUTING_SECONDS,
            registry=registry,
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
        """Makes the worker's series exist from the moment that it is known; it is not attached yet."""
        for metric in (
            self.worker_up,
            self.worker_on_trial,
            self.worker_streams,
            self.ejections,
            self.reconnects,
        ):
            metric.labels(address)
        self.workers.labels(WorkerState.UNREACHABLE.value).inc()

    def worker_changed(self, before: WorkerState, view: WorkerView) -> None:
        self.workers.labels(before.value).dec()
        self.workers.labels(view.state.value).inc()
        self.worker_up.labels(view.address).set(view.state is WorkerState.READY and view.model is not None)
        self.worker_on_trial.labels(view.address).set(view.on_trial)
