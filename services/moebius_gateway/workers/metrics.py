"""What the gateway's worker side counts."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from moebius_gateway.journal import DEATHS
from moebius_gateway.types import Reason
from moebius_gateway.workers.losses import OUTCOMES
from moebius_gateway.workers.view import WorkerState, WorkerView

REJOINED = "REJOINED"
RECOVERY_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 7.5, 10, 15, 20, 25, 30, 45, 60, 120, 300)
ROUTING_SECONDS = (0.000025, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.0025, 0.01)


class DispatcherMetrics:
    """Series of one dispatcher in one registry; those without a worker label exist from the start."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.workers = Gauge(
            "moebius_gateway_workers", "Known workers by state", ["state"], registry=registry
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
        self.migrations = Counter(
            "moebius_gateway_migrations",
            "Times that a generation lost the worker that ran it, by the reason (REJOINED: it left "
            "quarantine) and by how that ended: resumed, failed, poisoned, abandoned by its client",
            ["reason", "outcome"],
            registry=registry,
        )
        self.replayed = Counter(
            "moebius_gateway_tokens_replayed",
            "Tokens of prompt and output that were submitted again because a worker was lost",
            registry=registry,
        )
        self.recovery = Histogram(
            "moebius_gateway_recovery_seconds",
            "The gap that losing a worker left in a stream: from the last token before, or from the start, "
            "to the next one",
            ["reason"],
            buckets=RECOVERY_SECONDS,
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
        self.discovery_synced = Gauge(
            "moebius_gateway_discovery_synced",
            "1 once the workers were listed; always, where their addresses are settings",
            registry=registry,
        )
        self.discovery_age = Gauge(
            "moebius_gateway_discovery_age_seconds",
            "Since the Kubernetes API server was last heard; 0 where the workers' addresses are settings",
            registry=registry,
        )
        self.discovery_synced.set(1)
        self._of_workers = (
            self.worker_up,
            self.worker_on_trial,
            self.worker_streams,
            self.ejections,
            self.reconnects,
        )
        for state in WorkerState:
            self.workers.labels(state.value)
        for reason in (*sorted(DEATHS), Reason.DRAINING, Reason.KV_EXHAUSTED, REJOINED):
            self.recovery.labels(reason)
            for outcome in OUTCOMES:
                self.migrations.labels(reason, outcome)

    def loss_ended(self, reason: str, outcome: str) -> None:
        self.migrations.labels(reason, outcome).inc()

    def gap(self, reason: str, seconds: float) -> None:
        self.recovery.labels(reason).observe(seconds)

    def add_worker(self, name: str) -> None:
        """Makes the worker's series exist from the moment that it is known; it is not attached yet."""
        for metric in self._of_workers:
            metric.labels(name)
        self.workers.labels(WorkerState.UNREACHABLE.value).inc()

    def remove_worker(self, name: str, last: WorkerState) -> None:
        """It is no worker any more; `last`: the state that it was counted in."""
        for metric in self._of_workers:
            metric.remove(name)
        self.workers.labels(last.value).dec()

    def worker_changed(self, before: WorkerState, view: WorkerView) -> None:
        self.workers.labels(before.value).dec()
        self.workers.labels(view.state.value).inc()
        self.worker_up.labels(view.name).set(view.state is WorkerState.READY and view.model is not None)
        self.worker_on_trial.labels(view.name).set(view.on_trial)
