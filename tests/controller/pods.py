"""A cluster in miniature for `decide`: a kubelet with its back-off, a StatefulSet, nodes that can be lost.

It makes the pods that the API would show, so that what is decided goes the whole way: from pods and answers
to observations, to actions, to pods.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto

from moebius_cluster.pods import REVISION_LABEL, Container, ContainerState, Pod
from moebius_controller.decide import decide
from moebius_controller.history import remember
from moebius_controller.kubernetes.nodes import Node
from moebius_controller.kubernetes.observe import INSTANCE, LEVEL, MODEL, Answers, observe
from moebius_controller.policy import Policy
from moebius_controller.types import (
    Action,
    GiveUp,
    Health,
    History,
    MarkNode,
    Observation,
    Replace,
    SetLevel,
    State,
)

# Seconds from a pod's deletion to its successor, to that one's first container, and to the end of a readiness
# probe that fails.
RECREATED, SCHEDULED, UNREADY = 0.5, 2.0, 20.0
GRACE = 30.0


class Condition(StrEnum):
    """Of a worker whose container runs."""

    IDLE = auto()
    BUSY = auto()
    LOADING = auto()
    RESTARTING = auto()
    DRAINING = auto()
    FAILED = auto()
    # These are to be repaired, in time:
    HUNG = auto()
    STUCK = auto()


STATES = {
    Condition.IDLE: State.READY,
    Condition.BUSY: State.READY,
    Condition.STUCK: State.READY,
    Condition.LOADING: State.LOADING,
    Condition.RESTARTING: State.RESTARTING,
    Condition.DRAINING: State.DRAINING,
    Condition.FAILED: State.FAILED,
}
WELL = frozenset(Condition) - {Condition.FAILED, Condition.HUNG, Condition.STUCK}


class Phase(StrEnum):
    PENDING = auto()
    RUNS = auto()
    WAITS = auto()
    ENDED = auto()


@dataclass
class FakePod:
    name: str
    number: int
    created: float
    revision: str
    node: str
    phase: Phase = Phase.PENDING
    # When the phase, and when the condition, began; when the phase ends by itself.
    since: float = 0.0
    until: float = 0.0
    condition: Condition = Condition.LOADING
    condition_since: float = 0.0
    restarts: int = 0
    back_off: float = 0.0
    level: int = 0
    # Its deletion: when its grace ends, and when it is gone unless its node is lost.
    deadline: float | None = None
    gone_at: float = 0.0
    last_health: Health | None = None
    engine_restarts: int = 0
    fault: str = ""
    fault_at: float = 0.0
    # It takes no notice of levels.
    deaf: bool = False

    @property
    def uid(self) -> str:
        return f"{self.name}/{self.number}"

    def become(self, condition: Condition, now: float) -> None:
        if self.phase is Phase.RUNS and condition is not self.condition:
            self.condition, self.condition_since = condition, now

    def die(self, now: float) -> None:
        """Its container does. The kubelet starts the next: at once, after 10 s, 20 s ... 300 s."""
        if self.phase is Phase.RUNS and self.deadline is None:
            if now - self.since > 600:
                self.back_off = 0.0
            self.phase, self.until = Phase.WAITS, now + self.back_off
            self.since, self.last_health, self.engine_restarts = now, None, 0
            self.fault, self.fault_at = "", 0.0

    def end(self, now: float) -> None:
        """The whole pod does: it is evicted, say."""
        if self.deadline is None and self.phase is not Phase.ENDED:
            self.phase, self.since = Phase.ENDED, now

    def engine_dies(self, fault: str, now: float) -> None:
        if self.phase is Phase.RUNS and self.condition is not Condition.HUNG:
            self.engine_restarts += 1
            self.fault, self.fault_at = fault, now
            self.become(Condition.RESTARTING, now)

    def pass_time(self, now: float) -> None:
        if self.phase in (Phase.PENDING, Phase.WAITS) and now >= self.until and self.deadline is None:
            if self.phase is Phase.WAITS:
                self.restarts += 1
                self.back_off = min(max(10.0, 2 * self.back_off), 300.0)
            self.phase, self.since = Phase.RUNS, self.until
            self.condition, self.condition_since = Condition.LOADING, self.until

    def answers(self, now: float) -> Answers | None:
        if self.phase is not Phase.RUNS:
            return None
        if self.condition is Condition.HUNG:
            return Answers(self.last_health, now - self.condition_since)
        stuck = now - self.condition_since if self.condition is Condition.STUCK else 0.0
        requests = 3 if self.condition in (Condition.BUSY, Condition.STUCK) else 0
        self.last_health = Health(
            STATES[self.condition],
            requests,
            stuck,
            self.fault,
            "GPU_FAULT" if "device" in self.fault else "ENGINE_DEAD",
            self.fault_at,
            self.engine_restarts,
            0 if self.deaf else self.level,
            levels=LEVELS,
        )
        return Answers(self.last_health, 0.0)

    def pod(self, now: float) -> Pod:
        state, reason, message = ContainerState.RUNNING, "", ""
        if self.phase is Phase.WAITS:
            state, reason = ContainerState.WAITING, "CrashLoopBackOff"
            message = f"back-off {_go_duration(self.until - self.since)} restarting failed container=worker"
        elif self.phase is not Phase.RUNS:
            state, reason = ContainerState.WAITING, "ContainerCreating"
        ready = self.phase is Phase.RUNS and (
            STATES.get(self.condition) is State.READY
            or (self.condition is Condition.HUNG and now - self.condition_since < UNREADY)
        )
        return Pod(
            self.name,
            self.uid,
            "default",
            "" if self.phase is Phase.PENDING else self.node,
            phase={Phase.PENDING: "Pending", Phase.ENDED: "Failed"}.get(self.phase, "Running"),
            reason="Evicted" if self.phase is Phase.ENDED else "",
            created_at=float(int(self.created)),
            deletion=self.deadline,
            ready=ready,
            labels={REVISION_LABEL: self.revision, INSTANCE: "m", MODEL: "m"},
            annotations={LEVEL: str(self.level)} if self.level else {},
            containers=(
                Container(
                    "worker",
                    state,
                    reason,
                    message,
                    restart_count=self.restarts,
                    last_exit_code=137 if self.restarts or self.phase is Phase.WAITS else None,
                    last_reason="Error",
                ),
            ),
        )


LEVELS = 2


@dataclass
class FakeCluster:
    """Looks at its pods as `Controller` does; `reload` stands for a restart of the controller."""

    policy: Policy
    size: int
    node_count: int = 2
    reload: Callable[[History], History] = lambda history: history
    now: float = 1_700_000_000.0
    history: History = field(default_factory=dict)
    actions: list[tuple[float, str, Action]] = field(default_factory=list)
    revision: str = "a"

    def __post_init__(self) -> None:
        self.nodes = {f"n{i}": Node(f"n{i}", f"uid-n{i}") for i in range(self.node_count)}
        self._made = 0
        self.seen: list[Observation] = []
        # By name; None with the time from when the StatefulSet makes the next.
        self.pods: dict[str, FakePod] = {}
        self._missing = {f"w-{i}": self.now for i in range(self.size)}

    def pass_time(self, seconds: float) -> None:
        """In small steps, without a look."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 0.25)
            for pod in list(self.pods.values()):
                pod.pass_time(self.now)
                lost = pod.phase is not Phase.PENDING and not self.nodes[pod.node].ready
                if pod.deadline is not None and self.now >= pod.gone_at and not lost:
                    self._remove(pod)
            for name, when in list(self._missing.items()):
                if self.now >= when:
                    del self._missing[name]
                    self._make(name)

    def delete(self, pod: FakePod, grace: float) -> None:
        if pod.deadline is None:
            pod.deadline = self.now + grace
            # What hangs takes all of its grace.
            pod.gone_at = self.now + (grace if pod.condition is Condition.HUNG else min(1.0, grace))

    def lose(self, node: str, lost: bool = True) -> None:
        self.nodes[node] = replace(self.nodes[node], ready=not lost)

    def observations(self) -> list[Observation]:
        pods = list(self.pods.values())
        answers = {pod.uid: said for pod in pods if (said := pod.answers(self.now)) is not None}
        return observe([pod.pod(self.now) for pod in pods], self.nodes, answers, self.now)

    def look(self, refused: bool = False, late: bool = False) -> list[Action]:
        """One round. `refused`: nothing can be carried out. `late`: pods are seen as at the look before."""
        seen = self.seen if late else self.observations()
        self.seen = seen
        marked = [node.name for node in self.nodes.values() if node.marked]
        actions = decide(seen, self.history, self.policy, self.now, marked)
        assert decide(seen, self.reload(self.history), self.policy, self.now, marked) == actions
        # An action on what is another pod, or another run of it, by now is refused.
        runs = {one.worker: one.run for one in self.observations()}
        actions = [one for one in actions if not refused and runs.get(one.worker) == one.run]
        self.history = self.reload(remember(self.history, seen, actions, self.policy, self.now))
        for action in actions:
            pod = self.pods[action.worker]
            self.actions.append((self.now, pod.uid, action))
            self._perform(action, pod)
        return actions

    def run(self, seconds: float, interval: float = 1.0) -> None:
        end = self.now + seconds
        while self.now < end:
            self.pass_time(interval)
            self.look()

    def of(self, kind: type[Action]) -> list[Action]:
        return [action for _, _, action in self.actions if isinstance(action, kind)]

    def _perform(self, action: Action, pod: FakePod) -> None:
        match action:
            case Replace(force=True):
                self._remove(pod)
            case Replace():
                self.delete(pod, GRACE if action.drain else 1.0)
            case SetLevel():
                pod.level = action.level
            case MarkNode():
                self.nodes[action.node] = replace(self.nodes[action.node], marked=True)
            case GiveUp():
                pass
            case _:
                raise AssertionError(f"{action} is not for pods")

    def _remove(self, pod: FakePod) -> None:
        if self.pods.pop(pod.name, None) is not None:
            self._missing[pod.name] = self.now + RECREATED

    def _make(self, name: str) -> None:
        """On the first node that is well."""
        self._made += 1
        good = [node.name for node in self.nodes.values() if node.ready and not node.marked]
        if not good:
            self._missing[name] = self.now + 1.0
            return
        node = good[self._made % len(good)]
        self.pods[name] = FakePod(
            name, self._made, self.now, self.revision, node, since=self.now, until=self.now + SCHEDULED
        )


def _go_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
