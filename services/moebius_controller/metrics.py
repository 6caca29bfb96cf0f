"""The controller's Prometheus metrics."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from moebius_controller.decide import Observation, State
from moebius_controller.events import Event, What

# A worker whose process is gone, and one that was never heard of.
_DEAD, _SILENT = "DEAD", "SILENT"
_STATES = (*(state.value for state in State if state is not State.UNSPECIFIED), _DEAD, _SILENT)


class ControllerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._state = Gauge(
            "moebius_controller_worker_state",
            "1 for the state that the worker is in: that of its last answer, DEAD without a process, "
            "SILENT before its first answer.",
            ["worker", "state"],
            registry=registry,
        )
        self._silence = Gauge(
            "moebius_controller_worker_silence_seconds",
            "Since the worker's last answer.",
            ["worker"],
            registry=registry,
        )
        self._events = Counter(
            "moebius_controller_events",
            "What happened to the worker or was done about it: started, ready, died, killed, gave up.",
            ["worker", "event"],
            registry=registry,
        )
        self._last_look = Gauge(
            "moebius_controller_last_look_timestamp_seconds",
            "Unix time at which the controller last looked at its workers.",
            registry=registry,
        )

    def looked(self, observations: Sequence[Observation], events: Sequence[Event], now: float) -> None:
        self._last_look.set(now)
        for seen in observations:
            self._silence.labels(seen.worker).set(seen.silence)
            current = _state(seen)
            for state in _STATES:
                self._state.labels(seen.worker, state).set(state == current)
            for what in What:
                self._events.labels(seen.worker, what.value)
        for event in events:
            self._events.labels(event.worker, event.what.value).inc()


def _state(seen: Observation) -> str:
    if seen.run == 0 or seen.death is not None:
        return _DEAD
    return _SILENT if seen.health is None else seen.health.state.value
