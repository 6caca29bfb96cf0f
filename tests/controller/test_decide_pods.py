"""What is done about pods, scenario by scenario, and what is left to Kubernetes."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from moebius_controller.decide import decide
from moebius_controller.history import remember
from moebius_controller.policy import PODS
from moebius_controller.types import (
    Action,
    GiveUp,
    Health,
    MarkNode,
    Observation,
    Past,
    Replace,
    SetLevel,
    State,
    Trouble,
)
from tests.controller.pods import LEVELS, Condition, FakeCluster, FakePod, Phase

LOST = "CUDA error: device fallen off the bus"
FAULT = "CUDA error: an illegal memory access on the device"


def serving(size: int = 3, nodes: int = 2) -> FakeCluster:
    """All workers are idle."""
    cluster = FakeCluster(PODS, size, nodes)
    cluster.run(10)
    become(cluster, Condition.IDLE)
    cluster.run(3)
    assert not cluster.actions
    return cluster


def become(cluster: FakeCluster, condition: Condition) -> None:
    for pod in cluster.pods.values():
        pod.become(condition, cluster.now)


def until(cluster: FakeCluster, true: Callable[[], bool], within: float) -> float:
    """Runs until it is true; returns how long that took."""
    began = cluster.now
    while not true():
        assert cluster.now - began < within, f"not within {within} s: {cluster.actions}"
        cluster.run(1)
    return cluster.now - began


def keep(cluster: FakeCluster, seconds: float, what: Callable[[FakePod], None]) -> None:
    """Does it to every pod that runs, each second."""
    end = cluster.now + seconds
    while cluster.now < end:
        for pod in list(cluster.pods.values()):
            if pod.phase is Phase.RUNS and pod.deadline is None:
                what(pod)
        cluster.run(1)


def troubles(cluster: FakeCluster) -> list[tuple[type[Action], Trouble | None]]:
    return [(type(action), action.cause.trouble) for _, _, action in cluster.actions]


def test_nothing_is_done_about_a_fleet_that_is_well() -> None:
    cluster = serving()
    for condition in (Condition.BUSY, Condition.LOADING, Condition.RESTARTING, Condition.DRAINING):
        become(cluster, condition)
        cluster.run(1000, interval=5)
    assert not cluster.actions


def test_a_container_that_dies_is_restarted_by_the_kubelet_alone() -> None:
    cluster = serving()
    cluster.pods["w-0"].die(cluster.now)
    cluster.run(30)
    assert cluster.pods["w-0"].restarts == 1
    assert not cluster.actions


def test_a_hung_worker_is_replaced_when_the_kubelet_finds_so_too() -> None:
    cluster = serving()
    cluster.pods["w-0"].become(Condition.HUNG, cluster.now)
    took = until(cluster, lambda: bool(cluster.actions), 60)
    assert 20 <= took < 24
    (action,) = cluster.of(Replace)
    assert isinstance(action, Replace)
    assert (action.worker, action.cause.trouble, action.drain) == ("w-0", Trouble.SILENT, False)
    cluster.run(300)
    assert len(cluster.actions) == 1


def test_a_worker_that_only_we_do_not_hear_is_left_alone() -> None:
    """The path from here to there is broken, not the worker."""
    seen = Observation(*("w", 1, None, Health(State.READY)), silence=1e4, kept=True, vouched=True, group="g")
    assert not decide([seen], {"w": Past(seen=1)}, PODS, 1e9)
    assert decide([replace(seen, vouched=False)], {"w": Past(seen=1)}, PODS, 1e9)


def test_if_nobody_ever_answered_us_it_is_our_own_fault() -> None:
    mute = Observation("w", 1, None, None, silence=1e4, kept=True)
    heard = Observation("v", 1, None, Health(State.READY), kept=True)
    assert not decide([mute], {"w": Past(seen=1)}, PODS, 1e9)
    assert [action.worker for action in decide([mute, heard], {}, PODS, 1e9)] == ["w"]


@pytest.mark.parametrize("state", [State.LOADING, State.RESTARTING, State.DRAINING, State.FAILED])
def test_a_network_that_fails_for_a_while_costs_nobody_who_does_not_serve_yet(state: State) -> None:
    """The kubelet finds them not ready, whether they hang or not."""

    def silent(seconds: float) -> Observation:
        return Observation("w", 1, None, Health(state), silence=seconds, kept=True)

    def wanted(*seen: Observation) -> list[str]:
        past = {one.worker: Past(seen=1) for one in seen}
        return [one.worker for one in decide(seen, past, PODS, 1e9) if isinstance(one, Replace)]

    others = Observation("v", 1, None, Health(State.READY), kept=True, vouched=True)
    assert not wanted(silent(30), others)
    assert not wanted(silent(1e4), replace(others, silence=1e4)), "nobody answers us: that is our own fault"
    assert wanted(silent(61), others) == ["w"]


def test_what_is_silent_on_a_lost_node_is_left_to_kubernetes() -> None:
    cluster = serving(2)
    pod = cluster.pods["w-0"]
    pod.become(Condition.HUNG, cluster.now)
    cluster.lose(pod.node)
    cluster.run(600, interval=5)
    assert not cluster.actions


def test_what_is_pending_or_pulling_is_left_alone_for_as_long_as_it_takes() -> None:
    cluster = serving()
    cluster.delete(cluster.pods["w-0"], 1.0)
    cluster.run(2)
    pod = cluster.pods["w-0"]
    pod.until = cluster.now + 7200
    cluster.run(3600, interval=10)
    assert not cluster.actions


def dies_below(level: int, cluster: FakeCluster) -> Callable[[FakePod], None]:
    """It loads for two seconds, dies then on lower levels, and serves on others."""

    def what(pod: FakePod) -> None:
        if cluster.now - pod.since < 2:
            return
        if pod.level < level:
            pod.die(cluster.now)
        else:
            pod.become(Condition.IDLE, cluster.now)

    return what


def test_a_crash_loop_falls_to_the_next_level_and_serves() -> None:
    cluster = FakeCluster(PODS, 1)
    keep(cluster, 120, dies_below(1, cluster))
    # The second is for the pod that takes the first one's place.
    assert troubles(cluster) == [
        (SetLevel, Trouble.DEATHS),
        (Replace, Trouble.BACK_OFF),
        (SetLevel, None),
    ]
    assert not cluster.of(GiveUp)
    assert cluster.observations()[0].ready
    # Not after the kubelet's 10, 20, 40 seconds: a new pod starts at once.
    assert cluster.pods["w-0"].since - 1_700_000_000 < 45
    keep(cluster, 3600, dies_below(1, cluster))
    assert cluster.pods["w-0"].level == 1


def test_out_of_levels_it_is_given_up_once_and_tried_again_later() -> None:
    cluster = FakeCluster(PODS, 1)
    keep(cluster, 500, dies_below(99, cluster))
    levels = [action.level for action in cluster.of(SetLevel) if action.cause.trouble]  # type: ignore[union-attr]
    assert levels == list(range(1, LEVELS + 1))
    (given_up,) = cluster.of(GiveUp)
    assert "it died 6 times in a row" in given_up.cause.reason
    replaced = len(cluster.of(Replace))
    assert cluster.actions[-1][2] is given_up
    until(cluster, lambda: len(cluster.of(Replace)) > replaced, 750)
    keep(cluster, 20, dies_below(99, cluster))
    assert len(cluster.of(GiveUp)) == 2, "told again, since it was tried again"


def test_an_engine_that_dies_again_and_again_gets_the_next_level_without_a_restart() -> None:
    cluster = serving(1)
    for deaths in range(1, 6):
        assert not cluster.actions, deaths
        cluster.pods["w-0"].engine_dies("the engine was killed by SIGSEGV", cluster.now)
        cluster.run(2)
        cluster.pods["w-0"].become(Condition.BUSY, cluster.now)
        cluster.run(20)
    assert troubles(cluster) == [(SetLevel, Trouble.ENGINE_DEATHS)]
    assert "its engine died 5 times in a row" in cluster.actions[0][2].cause.reason


def test_a_restart_to_take_up_a_level_is_no_death() -> None:
    def observe(restarts: int, level: int, state: State = State.READY) -> Observation:
        health = Health(state, 1, engine_restarts=restarts, level=level, levels=3)
        return Observation("w", 1, None, health, kept=True, level=level)

    now, history = 1e9, {"w": Past(seen=1, engine_run=1, started_at=1e9, levels=3)}
    for restarts, level in ((4, 0), (6, 1), (9, 1)):
        now += 5
        seen = [observe(restarts, level)]
        assert not decide(seen, {"w": replace(history["w"], level=level)}, PODS, now), restarts
        history = remember({"w": replace(history["w"], level=level)}, seen, [], PODS, now)
    assert history["w"].engine_deaths == 3


def test_engine_deaths_that_are_far_apart_are_no_row() -> None:
    cluster = serving(1)
    for _ in range(12):
        cluster.pods["w-0"].engine_dies("the engine was killed by SIGSEGV", cluster.now)
        cluster.run(2)
        cluster.pods["w-0"].become(Condition.BUSY, cluster.now)
        cluster.run(310)
    assert not cluster.actions


def test_a_worker_whose_engine_cannot_be_started_goes_down_the_levels() -> None:
    cluster = serving(1)
    become(cluster, Condition.FAILED)
    cluster.run(10)
    assert troubles(cluster) == [
        *[(SetLevel, Trouble.FAILED)] * LEVELS,
        (GiveUp, Trouble.FAILED),
    ]
    cluster.run(430)
    assert len(cluster.actions) == 3
    cluster.run(330)
    assert troubles(cluster)[3:] == [(Replace, Trouble.FAILED), (SetLevel, None)]


def test_a_worker_that_takes_up_no_level_is_given_up_in_the_end() -> None:
    cluster = serving(1)
    end = cluster.now + 400
    while cluster.now < end:
        for pod in cluster.pods.values():
            pod.deaf = True
            pod.become(Condition.FAILED, cluster.now)
        cluster.run(1)
    assert len(cluster.of(GiveUp)) == 1
    assert len(cluster.of(Replace)) <= LEVELS


def test_a_recreated_pod_gets_the_level_at_once_and_a_new_template_none() -> None:
    cluster = serving(1)
    become(cluster, Condition.FAILED)
    cluster.run(1)
    become(cluster, Condition.IDLE)
    assert cluster.pods["w-0"].level == 1
    cluster.delete(cluster.pods["w-0"], 1.0)
    cluster.run(4)
    assert cluster.pods["w-0"].number == 2
    assert cluster.pods["w-0"].level == 1
    assert cluster.actions[-1][2] == SetLevel(
        "w-0", cluster.observations()[0].run, cluster.actions[-1][2].cause, 1
    )
    cluster.revision = "b"
    cluster.delete(cluster.pods["w-0"], 1.0)
    cluster.run(10)
    assert cluster.pods["w-0"].level == 0
    assert cluster.history["w-0"].level == 0


def test_a_pod_on_a_lost_node_is_removed_after_its_grace() -> None:
    cluster = serving(2)
    pod = cluster.pods["w-0"]
    cluster.lose(pod.node)
    cluster.run(600, interval=5)
    assert not cluster.actions, "who is not to go may come back"
    cluster.delete(pod, 30.0)
    took = until(cluster, lambda: bool(cluster.of(Replace)), 100)
    assert 60 <= took < 65
    (action,) = cluster.of(Replace)
    assert isinstance(action, Replace)
    assert action.force
    cluster.run(10)
    assert cluster.pods["w-0"].node != pod.node
    assert len(cluster.actions) == 1


def test_a_node_that_lost_a_device_is_marked_and_left() -> None:
    cluster = serving(4, nodes=2)
    sick = cluster.pods["w-0"]
    neighbours = [pod for pod in cluster.pods.values() if pod.node == sick.node and pod is not sick]
    assert neighbours
    sick.engine_dies(LOST, cluster.now)
    cluster.run(3)
    assert troubles(cluster) == [(MarkNode, Trouble.DEVICE_LOST), (Replace, Trouble.DEVICE_LOST)]
    assert cluster.nodes[sick.node].marked
    cluster.run(10)
    assert cluster.pods["w-0"].node != sick.node
    assert [cluster.pods[pod.name] for pod in neighbours] == neighbours
    become(cluster, Condition.IDLE)
    # A person repairs it and takes the mark away: what was before speaks against it no more.
    cluster.nodes[sick.node] = replace(cluster.nodes[sick.node], marked=False)
    cluster.run(60)
    assert len(cluster.actions) == 2


def test_nothing_leaves_a_node_before_it_is_marked() -> None:
    cluster = serving(4, nodes=2)
    node = cluster.pods["w-0"].node
    sick = [pod for pod in cluster.pods.values() if pod.node == node]
    for pod in sick:
        pod.engine_dies(LOST, cluster.now)
    cluster.pass_time(1)
    assert [type(action) for action in cluster.look()] == [MarkNode]
    assert [type(action) for action in cluster.look()] == [Replace] * len(sick)


def test_only_so_many_nodes_are_marked() -> None:
    cluster = serving(6, nodes=3)
    for pod in cluster.pods.values():
        pod.engine_dies(LOST, cluster.now)
    cluster.run(60)
    assert len(cluster.of(MarkNode)) == PODS.max_marked_nodes == 1


def test_a_mark_counts_before_it_is_seen() -> None:
    cluster = serving(6, nodes=3)
    for pod in cluster.pods.values():
        pod.engine_dies(LOST, cluster.now)
    cluster.pass_time(1)
    seen = cluster.observations()
    actions = decide(seen, cluster.history, PODS, cluster.now)
    assert [type(action) for action in actions] == [MarkNode]
    history = remember(cluster.history, seen, actions, PODS, cluster.now)
    later = decide(seen, history, PODS, cluster.now + 0.1)
    assert not [action for action in later if isinstance(action, MarkNode)]


def test_where_no_node_can_be_marked_a_lost_device_stands_in_the_way_of_nothing() -> None:
    cluster = serving(1)
    cluster.pods["w-0"].engine_dies(LOST, cluster.now)
    cluster.run(1)
    cluster.pods["w-0"].become(Condition.FAILED, cluster.now)
    cluster.pass_time(1)
    seen = cluster.observations()
    wanted = [decide(seen, {}, PODS, cluster.now, marked) for marked in ((), None)]
    assert [type(action) for (action,) in wanted] == [MarkNode, SetLevel]


def test_errors_of_a_kernel_are_not_blamed_on_nodes() -> None:
    """They come wherever the kernel runs; a level without it helps."""
    cluster = serving(4, nodes=2)
    for _ in range(5):
        for pod in cluster.pods.values():
            pod.engine_dies(FAULT, cluster.now)
        cluster.run(5)
        become(cluster, Condition.BUSY)
    assert not cluster.of(MarkNode)
    assert {action.worker for action in cluster.of(SetLevel)} == set(cluster.pods)


def test_errors_of_several_runs_on_one_node_alone_accuse_it() -> None:
    cluster = serving(6, nodes=2)
    node = cluster.pods["w-0"].node
    here = [pod for pod in cluster.pods.values() if pod.node == node]
    for sick in here[:2]:
        sick.engine_dies(FAULT, cluster.now)
        cluster.run(2)
    assert not cluster.actions
    here[2].engine_dies(FAULT, cluster.now)
    cluster.run(2)
    assert cluster.of(MarkNode)[0].cause.reason.startswith(f"3 runs on node {node} had errors of the device")


@pytest.mark.parametrize(
    ("condition", "others", "moved"),
    [(Condition.IDLE, True, True), (Condition.BUSY, True, False), (Condition.IDLE, False, False)],
)
def test_one_that_serves_is_moved_only_when_idle_and_not_the_last(
    condition: Condition, others: bool, moved: bool
) -> None:
    cluster = serving(3, nodes=3)
    sick = cluster.pods["w-0"]
    sick.engine_dies(LOST, cluster.now)
    if not others:
        for pod in cluster.pods.values():
            pod.become(Condition.LOADING, cluster.now)
    cluster.pass_time(0.5)
    sick.become(condition, cluster.now)
    cluster.run(5)
    replaced = cluster.of(Replace)
    assert [action.worker for action in replaced] == (["w-0"] if moved else [])
    assert all(action.drain for action in replaced)  # type: ignore[union-attr]


def test_a_node_that_reports_a_broken_gpu_accuses_itself() -> None:
    cluster = serving(2, nodes=2)
    sick = cluster.pods["w-0"]
    cluster.nodes[sick.node] = replace(cluster.nodes[sick.node], fault="XidCriticalError: Xid 79")
    cluster.run(30)
    assert not cluster.actions, "a worker that serves on it has another GPU"
    sick.become(Condition.RESTARTING, cluster.now)
    cluster.run(3)
    assert troubles(cluster) == [(MarkNode, Trouble.DEVICE_LOST), (Replace, Trouble.DEVICE_LOST)]


def test_a_rollout_is_left_alone_but_not_for_ever() -> None:
    cluster = serving(3)
    cluster.revision = "b"
    cluster.delete(cluster.pods["w-0"], 1.0)
    cluster.run(5)
    cluster.pods["w-0"].become(Condition.HUNG, cluster.now)
    cluster.pods["w-1"].end(cluster.now)
    cluster.run(1700, interval=5)
    assert not cluster.of(Replace)
    cluster.run(200, interval=5)
    assert {action.worker for action in cluster.of(Replace)} == {"w-0", "w-1"}


def test_pods_that_end_again_and_again_are_cleared_away_with_growing_pauses() -> None:
    """As UnexpectedAdmissionError does on a node whose device plugin is sick, by the second."""
    cluster = serving(1)
    times: list[float] = []
    end = cluster.now + 900
    while cluster.now < end:
        for pod in cluster.pods.values():
            if pod.phase is Phase.RUNS:
                pod.end(cluster.now)
        before = len(cluster.of(Replace))
        cluster.run(1)
        if len(cluster.of(Replace)) > before:
            times.append(cluster.now)
    pauses = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert 10 <= len(times) < 60
    assert pauses[0] < 20
    assert max(pauses[:12]) > 30


@pytest.mark.timed
@pytest.mark.usefixtures("frozen_heap")
def test_a_thousand_workers_are_decided_on_in_milliseconds() -> None:
    cluster = serving(1000, nodes=125)
    seen = cluster.observations()
    history = remember(cluster.history, seen, [], PODS, cluster.now)
    began = time.process_time()
    for _ in range(5):
        assert not decide(seen, history, PODS, cluster.now)
    assert (time.process_time() - began) / 5 < 0.1
