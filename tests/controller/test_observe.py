"""What the controller sees in pods as the API gives them."""

from dataclasses import replace
from typing import Any

import pytest

from moebius_cluster.pods import Pod, pod_of
from moebius_controller.kubernetes.nodes import Node, node_of
from moebius_controller.kubernetes.observe import Answers, observe, run_of
from moebius_controller.types import Health, Observation, State
from tests.cluster_fakes import pod

CREATED = "2026-01-01T00:00:00Z"
CREATED_AT = 1767225600
NOW = CREATED_AT + 3600.0
WELL = {"node-0": Node("node-0", "u")}
LABELS = {
    "app.kubernetes.io/instance": "m",
    "moebius.dev/model": "small",
    "controller-revision-hash": "a",
}


def raw(name: str = "w-0", uid: str = "u-0", **metadata: Any) -> dict[str, Any]:
    metadata = {"creationTimestamp": CREATED, "labels": LABELS, **metadata}
    return pod(name, "10.0.0.1", uid=uid, **metadata)


def container(**changes: Any) -> dict[str, Any]:
    """A running pod whose container is another way."""
    one = raw()
    one["status"]["conditions"] = []
    one["status"]["containerStatuses"][0] |= {"ready": False, **changes}
    return one


def waiting(reason: str, message: str = "", restarts: int = 0, /, **last: Any) -> dict[str, Any]:
    return container(
        state={"waiting": {"reason": reason, "message": message}},
        restartCount=restarts,
        lastState={"terminated": last} if last else {},
    )


def phase(phase: str, reason: str = "", message: str = "", ip: str | None = None) -> dict[str, Any]:
    one = raw()
    one["status"] |= {"phase": phase, "reason": reason, "message": message, "podIP": ip, "conditions": []}
    one["status"]["containerStatuses"] = []
    return one


def seen(obj: dict[str, Any], answers: Answers | None = None, nodes: Any = WELL) -> Observation:
    one = pod_of(obj)
    (observation,) = observe([one], nodes, {one.uid: answers} if answers else {}, NOW)
    return observation


def test_a_worker_that_serves() -> None:
    health = Health(State.READY, 3)
    one = seen(raw(), Answers(health, 0.5))
    assert one == Observation(
        worker="w-0",
        run=CREATED_AT << 20,
        health=health,
        silence=0.5,
        revision="a",
        group="m/small",
        kept=True,
        vouched=True,
        node="node-0",
    )
    assert one.ready


@pytest.mark.parametrize(
    ("obj", "death", "restart_in"),
    [
        (
            waiting(
                "CrashLoopBackOff",
                "back-off 2m40s restarting failed container=worker pod=w-0_default(u)",
                5,
                exitCode=139,
                reason="Error",
            ),
            "it was killed by SIGSEGV",
            160,
        ),
        (
            waiting("CrashLoopBackOff", "back-off 10s restarting failed ...", 1, exitCode=2, reason="Error"),
            "it exited with status 2",
            10,
        ),
        (
            waiting("CrashLoopBackOff", "in other words", 4, exitCode=137, reason="OOMKilled"),
            "it was killed by SIGKILL (OOMKilled)",
            80,
        ),
        (
            waiting(
                "CrashLoopBackOff",
                "back-off 5m0s restarting failed ...",
                50,
                exitCode=1,
                reason="Error",
                message="loading\nmoebius-worker: no such model\n",
            ),
            "it exited with status 1: moebius-worker: no such model",
            300,
        ),
        (
            container(state={"terminated": {"exitCode": 0, "reason": "Completed"}}),
            "it exited with status 0",
            0,
        ),
        (
            phase("Failed", "Evicted", "The node was low on resource: memory."),
            "Evicted: The node was low on resource: memory.",
            None,
        ),
        (
            phase("Failed", "UnexpectedAdmissionError", "Allocate failed due to no healthy devices"),
            "UnexpectedAdmissionError: Allocate failed due to no healthy devices",
            None,
        ),
        (phase("Failed"), "its container ended", None),
        (phase("Succeeded"), "its container ended", None),
    ],
)
def test_deaths(obj: dict[str, Any], death: str, restart_in: float | None) -> None:
    one = seen(obj, Answers(Health(State.READY), 0))
    assert (one.death, one.restart_in) == (death, restart_in)
    assert not one.ready
    assert one.health is None, "what it said before is no answer"
    assert not one.held


@pytest.mark.parametrize(
    ("obj", "held"),
    [
        (phase("Pending"), "it waits: Pending"),
        (phase("Pending", "SchedulingGated"), "it waits: SchedulingGated"),
        (waiting("ContainerCreating"), "it waits: ContainerCreating"),
        (waiting("ImagePullBackOff"), "it waits: ImagePullBackOff"),
        (waiting("ErrImagePull"), "it waits: ErrImagePull"),
        (waiting("CreateContainerConfigError"), "it waits: CreateContainerConfigError"),
        (waiting("PodInitializing", "", 2), "it waits: PodInitializing"),
        (raw(creationTimestamp="2026-01-01T01:00:00Z"), "it is new"),
    ],
)
def test_what_is_left_alone(obj: dict[str, Any], held: str) -> None:
    one = seen(obj)
    assert (one.held, one.death, one.ready) == (held, None, False)


def test_runs_are_numbered_by_creation_and_restarts() -> None:
    first = pod_of(container(restartCount=3))
    assert run_of(first) == (CREATED_AT << 20) + 3
    later = pod_of(raw(creationTimestamp="2026-01-01T00:00:01Z"))
    assert run_of(later) > run_of(first)
    one = seen(container(restartCount=3))
    assert (one.restarts, one.body) == (3, CREATED_AT << 20)


def test_the_level_is_read_from_the_annotation() -> None:
    def level(text: str) -> int:
        return seen(raw(annotations={"moebius.dev/fallback-level": text})).level

    assert [level(text) for text in ("2", "", "-1", "two", "1.5")] == [2, 0, 0, 0, 0]


def going(after: float) -> dict[str, Any]:
    """Its grace ended so many seconds ago."""
    when = NOW - after - CREATED_AT
    return raw(deletionTimestamp=f"2026-01-01T{int(when) // 3600:02}:{int(when) % 3600 // 60:02}:00Z")


@pytest.mark.parametrize(
    ("nodes", "overdue"),
    [
        (WELL, None),
        ({"node-0": replace(WELL["node-0"], ready=False)}, 120.0),
        ({}, 120.0),  # The node is not there any more.
        (None, None),  # Nothing is known of nodes.
    ],
)
def test_a_pod_that_is_to_go_is_overdue_on_a_lost_node_only(nodes: Any, overdue: float | None) -> None:
    one = seen(going(120), Answers(Health(State.READY), 0), nodes)
    assert one.going
    assert not one.ready
    assert one.overdue == overdue


def test_pods_of_two_revisions_are_a_rollout_those_that_go_not_counted() -> None:
    old, new = raw("w-0", "u-0"), raw("w-1", "u-1", labels={**LABELS, "controller-revision-hash": "b"})
    other = raw("v-0", "u-2", labels={**LABELS, "moebius.dev/model": "other"})

    def rolling(*objs: dict[str, Any]) -> list[bool]:
        return [one.rolling for one in observe(map(pod_of, objs), WELL, {}, NOW)]

    assert rolling(old, new, other) == [True, True, False]
    assert rolling(old, other) == [False, False]
    old["metadata"]["deletionTimestamp"] = "2026-01-01T01:00:00Z"
    assert rolling(old, new, other) == [False, False, False]


def test_of_two_pods_of_a_name_the_later_one_counts() -> None:
    pods: list[Pod] = [
        pod_of(raw(uid="new", creationTimestamp="2026-01-01T00:10:00Z")),
        pod_of(raw(uid="old")),
    ]
    (one,) = observe(pods, WELL, {}, NOW)
    assert one.run == CREATED_AT + 600 << 20


@pytest.mark.parametrize(
    ("conditions", "ready", "fault"),
    [
        ([("Ready", "True")], True, ""),
        ([("Ready", "Unknown")], False, ""),
        ([("Ready", "False")], False, ""),
        ([], False, ""),
        ([("Ready", "True"), ("GPUUnhealthy", "False")], True, ""),
        ([("Ready", "True"), ("GPUUnhealthy", "True")], True, "GPUUnhealthy: Xid 79"),
    ],
)
def test_nodes(conditions: list[tuple[str, str]], ready: bool, fault: str) -> None:
    obj = {
        "metadata": {"name": "n", "uid": "u", "labels": {"moebius.dev/gpu-fault": "x"}},
        "status": {
            "conditions": [
                {"type": kind, "status": status, "message": "Xid 79"} for kind, status in conditions
            ]
        },
    }
    assert node_of(obj, ["GPUUnhealthy"]) == Node("n", "u", ready, True, fault)
    assert not node_of({"metadata": {"name": "n", "uid": "u"}}, []).ready
