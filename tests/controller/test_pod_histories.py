"""Random histories of a cluster: what must hold whatever happens, with the kubelet's back-off in it."""

import json
import os
from dataclasses import replace
from enum import StrEnum, auto

from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_controller.events import KEPT_EVENTS, events_of
from moebius_controller.policy import LADDER, PODS, Policy
from moebius_controller.state_file import ControllerState, parse_state, write_state
from moebius_controller.types import GiveUp, History, Replace, SetLevel, State, Step, Trouble
from tests.controller.fleet import seconds_of
from tests.controller.pods import UNREADY, WELL, Condition, FakeCluster, FakePod, Phase

SIZE = 3
FAILED_SECONDS = next(
    rung.seconds for rung in LADDER if (rung.when, rung.step) == (Trouble.FAILED, Step.REPLACE)
)


class Happens(StrEnum):
    """Besides a condition of the worker."""

    DIES = auto()
    ENDS = auto()
    ENGINE_DIES = auto()
    DELETED = auto()
    NODE_LOST = auto()
    NODE_BACK = auto()
    ROLLOUT = auto()
    API_REFUSES = auto()
    NOTHING = auto()


steps = st.lists(
    st.tuples(
        st.one_of(st.floats(0.25, 4), st.floats(4, 90)),
        st.integers(0, SIZE - 1),
        # A row takes several deaths.
        st.sampled_from([*Condition, *Happens, *[Happens.DIES] * 6, *[Happens.ENGINE_DIES] * 3]),
        # Whether pods are seen as at the look before.
        st.sampled_from([False, False, True]),
    ),
    min_size=15,
    max_size=50,
)
policies = st.builds(
    Policy,
    ladder=st.just(LADDER),
    restart_delay=st.floats(0.5, 3),
    max_restart_delay=st.floats(1, 60),
    healthy_after=st.floats(10, 300),
    retry_delay=st.floats(5, 600),
    rollout_patience=st.floats(10, 1800),
)


def restarted(history: History) -> History:
    state = parse_state(write_state(ControllerState(1, history)), "memory")
    assert state.history == history
    return state.history


def sickness(pod: FakePod) -> tuple[str, float, float]:
    """One that ends between two looks is another one at the next."""
    return pod.uid, pod.since, pod.condition_since


class Watch:
    """Holds what is done against what the pods really are."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        # Since the first look at which something could be done about a sickness.
        self.ripe: dict[tuple[str, float, float], float] = {}
        self.given_up: set[str] = set()

    def look(self, refused: bool = False, late: bool = False) -> None:
        cluster = self.cluster
        before = {name: (pod, self.well(pod), self.may_be_forced(pod)) for name, pod in cluster.pods.items()}
        actions = cluster.look(refused, late)
        for action in actions:
            pod, well, may_be_forced = before[action.worker]
            match action:
                case Replace(force=True):
                    assert late or may_be_forced
                case Replace():
                    assert late or not well, f"{pod} is replaced: {action.cause}"
                    assert late or not self.rolls(pod.name), f"{pod} is replaced in a rollout: {action.cause}"
                case GiveUp():
                    assert action.worker not in self.given_up, "given up twice"
                    self.given_up.add(action.worker)
            if isinstance(action, Replace | SetLevel):
                self.given_up.discard(action.worker)
        for seen in cluster.seen:
            lived = cluster.now - cluster.history[seen.worker].started_at
            if seen.ready and lived >= cluster.policy.healthy_after:
                self.given_up.discard(seen.worker)
        acted = {action.worker for action in actions}
        if refused or late:
            # The clock starts anew with the next look that can bring something.
            self.ripe.clear()
            return
        for pod, _, _ in before.values():
            if pod.name in acted or not self.is_ripe(pod):
                self.ripe.pop(sickness(pod), None)
        for pod in cluster.pods.values():
            if self.is_ripe(pod):
                since = self.ripe.setdefault(sickness(pod), cluster.now)
                assert cluster.now - since <= self.patience(), f"nothing is done about {pod}"

    def well(self, pod: FakePod) -> bool:
        """Nothing may be done about it: it serves, may come to serve, or is about to go."""
        if pod.deadline is not None or pod.phase is Phase.PENDING:
            return True
        return pod.phase is Phase.RUNS and pod.condition in WELL

    def rolls(self, name: str) -> bool:
        """Pods of two revisions are there, for a time for which that is left alone."""
        pods = [pod for pod in self.cluster.pods.values() if pod.deadline is None]
        began = self.cluster.history[name].rolling_at
        recent = self.cluster.now - began < self.cluster.policy.rollout_patience
        return recent and len({pod.revision for pod in pods}) > 1

    def may_be_forced(self, pod: FakePod) -> bool:
        lost = not self.cluster.nodes[pod.node].ready
        return lost and pod.deadline is not None and self.cluster.now > pod.deadline

    def is_ripe(self, pod: FakePod) -> bool:
        """It is sick for long enough, and nothing speaks against an action."""
        cluster = self.cluster
        past = cluster.history.get(pod.name)
        if past is None or self.well(pod) or len({other.revision for other in cluster.pods.values()}) > 1:
            return False
        lasted = cluster.now - pod.condition_since
        if pod.phase is Phase.WAITS:
            return pod.until - pod.since > seconds_of(cluster.policy, Trouble.BACK_OFF) + 1
        if pod.phase is Phase.ENDED:
            return cluster.now - past.died_at >= seconds_of(cluster.policy, Trouble.ENDED)
        if pod.condition is Condition.STUCK:
            return lasted > seconds_of(cluster.policy, Trouble.STUCK)
        if pod.condition is Condition.HUNG:
            # Of what did not serve, the kubelet's word says nothing; it counts if others answer.
            known = pod.last_health is not None and pod.last_health.state is State.READY
            heard = known or any(
                other.phase is Phase.RUNS and other.condition is not Condition.HUNG
                for other in cluster.pods.values()
            )
            if not cluster.nodes[pod.node].ready:
                return False
            limit = seconds_of(cluster.policy, Trouble.SILENT if known else Trouble.MUTE)
            return heard and lasted > max(limit, UNREADY)
        return cluster.now - max(past.failed_at or cluster.now, past.level_at) > FAILED_SECONDS

    def patience(self) -> float:
        """The longest pause that the policy makes."""
        return 1.25 * max(self.cluster.policy.max_restart_delay, self.cluster.policy.retry_delay)


@settings(max_examples=2000 if os.environ.get("MOEBIUS_LONG_TRACES") else 50, deadline=None)
@given(policy=policies, steps=steps)
def test_every_cause_has_one_action_and_nothing_well_has_any(
    policy: Policy, steps: list[tuple[float, int, Condition | Happens, bool]]
) -> None:
    cluster = FakeCluster(policy, SIZE, reload=restarted)
    watch = Watch(cluster)
    for passed, number, what, late in steps:
        cluster.pass_time(passed)
        pod = cluster.pods.get(f"w-{number}")
        if pod is not None:
            happen(cluster, pod, what)
        watch.look(what is Happens.API_REFUSES, late)
    check_once(cluster)


def happen(cluster: FakeCluster, pod: FakePod, what: Condition | Happens) -> None:
    match what:
        case Condition():
            pod.become(what, cluster.now)
        case Happens.DIES:
            pod.die(cluster.now)
        case Happens.ENDS:
            pod.end(cluster.now)
        case Happens.ENGINE_DIES:
            pod.engine_dies("the engine was killed by SIGSEGV", cluster.now)
        case Happens.DELETED:
            cluster.delete(pod, 30.0)
        case Happens.NODE_LOST | Happens.NODE_BACK:
            cluster.lose(pod.node, lost=what is Happens.NODE_LOST)
        case Happens.ROLLOUT:
            # Begun, and left to whoever goes on with it.
            cluster.revision += "b"
            cluster.delete(pod, 30.0)


def check_once(cluster: FakeCluster) -> None:
    """No two actions of a kind for one cause."""
    replaced = [(uid, action.force) for _, uid, action in cluster.actions if isinstance(action, Replace)]
    assert len(set(replaced)) == len(replaced)
    levels = [(uid, action.level) for _, uid, action in cluster.actions if isinstance(action, SetLevel)]
    assert len(set(levels)) == len(levels)


def test_the_history_of_a_large_fleet_fits_in_a_configmap() -> None:
    """Counted for a tenth of it."""
    cluster = FakeCluster(PODS, 100, node_count=13)
    cluster.run(10)
    said = "CUDA error: an illegal memory access was encountered by the device " * 100
    for _ in range(5):
        for pod in cluster.pods.values():
            pod.engine_dies(said, cluster.now)
        cluster.run(3)
    assert len(cluster.of(SetLevel)) == 100
    before = {name: replace(past, ready=0, dead=0) for name, past in cluster.history.items()}
    died = [replace(seen, death=said) for seen in cluster.observations()]
    events = events_of(before, died, [], cluster.now)[-KEPT_EVENTS:]
    history = write_state(ControllerState(1, cluster.history))
    assert len(json.loads(history)["history"]) == 100
    # The API refuses more than 2**20.
    assert 10 * len(history) + len(write_state(ControllerState(1, events=tuple(events)))) < 1_000_000
