"""Pods as data: from JSON as API servers of 1.20 to today give it."""

import pytest

from moebius_cluster.pods import Container, ContainerState, Pod, pod_of
from tests.cluster_fakes import pod

WHOLE = {
    "metadata": {
        "name": "moebius-demo-0",
        "namespace": "models",
        "uid": "9d2c",
        "creationTimestamp": "2026-11-29T10:00:00Z",
        "deletionTimestamp": "2026-11-29T10:05:30Z",
        "deletionGracePeriodSeconds": 30,
        "labels": {"app.kubernetes.io/component": "worker", "controller-revision-hash": "moebius-demo-7d4"},
        "annotations": {"moebius.dev/fallback-level": "1"},
    },
    "spec": {
        "nodeName": "gpu-3",
        "containers": [
            {"name": "sidecar", "ports": [{"containerPort": 9}]},
            {
                "name": "worker",
                "ports": [
                    {"name": "grpc", "containerPort": 7601},
                    {"name": "metrics", "containerPort": 9401},
                ],
            },
        ],
    },
    "status": {
        "phase": "Running",
        "podIP": "10.1.2.3",
        "conditions": [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                "name": "worker",
                "ready": False,
                "restartCount": 3,
                "state": {
                    "waiting": {
                        "reason": "CrashLoopBackOff",
                        "message": "back-off 40s restarting failed container",
                    }
                },
                "lastState": {
                    "terminated": {
                        "exitCode": 137,
                        "reason": "OOMKilled",
                        "startedAt": "2026-11-29T10:01:00Z",
                        "finishedAt": "2026-11-29T10:02:00.5Z",
                    }
                },
            }
        ],
    },
}


def test_a_whole_pod() -> None:
    found = pod_of(WHOLE)
    assert found == Pod(
        name="moebius-demo-0",
        uid="9d2c",
        namespace="models",
        node="gpu-3",
        ip="10.1.2.3",
        phase="Running",
        created_at=1795946400.0,
        deletion=1795946730.0,
        ready=False,
        labels={"app.kubernetes.io/component": "worker", "controller-revision-hash": "moebius-demo-7d4"},
        annotations={"moebius.dev/fallback-level": "1"},
        containers=(
            Container("sidecar"),
            Container(
                "worker",
                state=ContainerState.WAITING,
                reason="CrashLoopBackOff",
                message="back-off 40s restarting failed container",
                restart_count=3,
                last_reason="OOMKilled",
                last_exit_code=137,
            ),
        ),
        ports={"grpc": 7601, "metrics": 9401},
    )
    assert found.revision == "moebius-demo-7d4"
    assert found.address("grpc") == "10.1.2.3:7601"
    assert found.address("http") is None
    assert found.container("worker") is found.containers[1]
    assert found.container("other") is None


def test_the_state_of_a_container() -> None:
    def of(state: object) -> Container:
        raw = pod("a")
        raw["metadata"]["uid"] = "u"
        raw["status"]["containerStatuses"][0]["state"] = state
        return pod_of(raw).containers[0]

    running = of({"running": {"startedAt": "2026-11-29T10:00:00Z"}})
    assert (running.state, running.started_at) == (ContainerState.RUNNING, 1795946400.0)
    ended = of({"terminated": {"exitCode": 0, "reason": "Completed", "startedAt": None}})
    assert (ended.state, ended.exit_code, ended.started_at) == (ContainerState.TERMINATED, 0, None)
    for nothing in ({}, None):
        assert of(nothing).state is ContainerState.WAITING


@pytest.mark.parametrize("status", [{}, None, {"phase": "Pending", "podIP": None, "containerStatuses": None}])
def test_a_pod_of_which_little_is_known(status: object) -> None:
    raw = {
        "metadata": {"name": "a", "uid": "u", "labels": None},
        "spec": {"containers": [{"name": "worker"}]},
    }
    found = pod_of(raw | {"status": status})
    assert (found.ip, found.node, found.ready, found.deletion) == ("", "", False, None)
    assert found.labels == {}
    assert found.containers == (Container("worker"),)
    assert found.address("grpc") is None


def test_an_evicted_pod_is_over() -> None:
    raw = {
        "metadata": {"name": "a", "uid": "u"},
        "status": {"phase": "Failed", "reason": "Evicted", "message": "low"},
    }
    found = pod_of(raw)
    assert found.over
    assert (found.reason, found.message) == ("Evicted", "low")
    assert not pod_of(WHOLE).over


def test_an_ipv6_address_is_in_brackets() -> None:
    raw = pod("a", "fd00::1") | {"metadata": {"name": "a", "uid": "u"}}
    assert pod_of(raw).address("grpc") == "[fd00::1]:7601"
