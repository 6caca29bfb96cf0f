"""The controller's Prometheus metrics."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from moebius_common.build_info import tell_build
from moebius_controller.events import Event, What
from moebius_controller.types import (
    Action,
    GiveUp,
    History,
    MarkNode,
    Observation,
    Past,
    Replace,
    SetLevel,
    State,
    Trouble,
)
from moebius_controller.view import View

# A worker whose process is gone, and one that was never heard of.
_DEAD, _SILENT = "DEAD", "SILENT"
_STATES = (*(state.value for state in State if state is not State.UNSPECIFIED), _DEAD, _SILENT)
_ACTIONS = ("start", "replace", "force", "set_level", "mark_node", "give_up")
# A level that is set again on a new pod, or a first start, has no trouble as its cause.
_NO_TROUBLE = "none"


class ControllerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        tell_build("controller", registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(f"moebius_controller_{name}", about, labels, registry=registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"moebius_controller_{name}", about, labels, registry=registry)

        self._state = gauge(
            "worker_state",
            "1 for the state that the worker is in: that of its last answer, DEAD without a process, "
            "SILENT before its first answer.",
            "worker",
            "state",
        )
        self._silence = gauge("worker_silence_seconds", "Since the worker's last answer.", "worker")
        self._level = gauge(
            "worker_fallback_level",
            "The fallback level that the worker is to run on: 0 is as configured.",
            "worker",
        )
        self._given_up = gauge(
            "worker_given_up", "1 while the worker is left alone because nothing helped.", "worker"
        )
        self._events = counter(
            "events",
            "What happened to the worker or was done about it: " + ", ".join(What) + ".",
            "worker",
            "event",
        )
        self._actions = counter(
            "actions", "What was done, and what was wrong with the worker.", "action", "trouble"
        )
        self._marked = gauge("marked_nodes", "Nodes that are marked as having a broken GPU.")
        self._leader = gauge(
            "leader", "1 if this controller acts; others only watch. There is one on a machine of its own."
        )
        self._hands_off = gauge(
            "hands_off", "1 while nothing may be done: another one leads, or what is seen is out of date."
        )
        self.api_errors = counter(
            "api_errors", "Calls of the Kubernetes API that failed, by what they were for.", "call"
        )
        self.discovery_age = gauge(
            "discovery_age_seconds", "Since the API server was last heard of these objects.", "kind"
        )
        self.discovery_synced = gauge(
            "discovery_synced", "1 if these objects were listed since the start.", "kind"
        )
        self._last_look = gauge(
            "last_look_timestamp_seconds", "Unix time at which the controller last looked at its workers."
        )
        for action in _ACTIONS:
            for trouble in (*Trouble, _NO_TROUBLE):
                self._actions.labels(action, trouble)
        # The state of those that are shown, and who has counters.
        self._shown: dict[str, str] = {}
        self._counted: set[str] = set()

    def leads(self, leading: bool) -> None:
        self._leader.set(leading)

    def looked(
        self,
        view: View,
        history: History,
        events: Sequence[Event],
        actions: Sequence[Action],
        now: float,
    ) -> None:
        """`history`: after what was done in this look."""
        self._last_look.set(now)
        self._hands_off.set(bool(view.hands_off))
        self._marked.set(len(view.marked_nodes or ()))
        for seen in view.observations:
            self._show(seen, history.get(seen.worker, Past(level=seen.level)))
        self._forget(self._shown.keys() - {seen.worker for seen in view.observations})
        self._forget_counts(self._counted - self._shown.keys() - history.keys())
        for event in events:
            self._events.labels(event.worker, event.what).inc()
        for action in actions:
            self._actions.labels(_name(action), action.cause.trouble or _NO_TROUBLE).inc()

    def _show(self, seen: Observation, past: Past) -> None:
        worker, current = seen.worker, _state(seen)
        if worker not in self._shown:
            self._counted.add(worker)
            for what in What:
                self._events.labels(worker, what)
        if current != self._shown.get(worker):
            self._shown[worker] = current
            for state in _STATES:
                self._state.labels(worker, state).set(state == current)
        self._silence.labels(worker).set(seen.silence)
        self._level.labels(worker).set(past.level)
        self._given_up.labels(worker).set(bool(past.given_up_at))

    def _forget(self, workers: Iterable[str]) -> None:
        """Their counters stay for as long as they are remembered: the last thing may not be collected yet."""
        for worker in workers:
            del self._shown[worker]
            for state in _STATES:
                self._state.remove(worker, state)
            for gauge in (self._silence, self._level, self._given_up):
                gauge.remove(worker)

    def _forget_counts(self, workers: set[str]) -> None:
        self._counted -= workers
        for worker in workers:
            for what in What:
                self._events.remove(worker, what)


def _state(seen: Observation) -> str:
    if seen.run == 0 or seen.death is not None:
        return _DEAD
    return _SILENT if seen.health is None else seen.health.state.value


def _name(action: Action) -> str:
    match action:
        case Replace():
            return "force" if action.force else "replace"
        case SetLevel():
            return "set_level"
        case MarkNode():
            return "mark_node"
        case GiveUp():
            return "give_up"
        case _:
            return "start"
