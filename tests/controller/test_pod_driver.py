"""The driver for pods over an API server in miniature and real probes: what it sees, says and survives."""

import asyncio
import json
import shutil
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from kubernetes import client

from moebius_cluster.pods import Pod
from moebius_controller.kubernetes.driver import CALLS
from moebius_controller.kubernetes.lease import Lease
from moebius_controller.kubernetes.nodes import Node
from moebius_controller.probe import Rhythm
from moebius_controller.types import Action
from moebius_proto.channel import WorkerTls
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.certificates import authority, signed
from tests.cluster_fakes import PODS, FakeApi
from tests.controller.cluster import (
    CONFIG_MAP,
    NODES,
    Worker,
    controller,
    deletions,
    ended,
    events,
    put_node,
    put_pod,
    served,
    unready,
)
from tests.waiting import until


async def test_a_pod_that_ended_is_deleted_by_its_uid_and_people_are_told() -> None:
    worker = Worker()
    with FakeApi() as api:
        async with served(worker) as port, controller(api) as running:
            made = put_pod(api, "w-0", port)
            await running.sees("w-0", "READY")
            api.change(f"{PODS}/w-0", ended)
            await until(lambda: deletions(api), "the pod is deleted")
            await running.sees("w-0", "DEAD")
            await until(lambda: events(api), "an event")
            (name, how), *more = deletions(api)
            assert (name, how["preconditions"], how["gracePeriodSeconds"]) == (
                "w-0",
                {"uid": made["metadata"]["uid"]},
                1,
            )
            await asyncio.sleep(0.6)
            assert not more
            assert len(deletions(api)) == 1
            reason, about, message = events(api)[0]
            assert (reason, about) == ("WorkerKilled", "w-0")
            assert message == "Evicted: The node was low on memory"
            assert running.metric("actions_total", action="replace", trouble="ended") == 1


async def test_a_worker_that_hangs_is_deleted_once_the_kubelet_finds_so_too() -> None:
    worker = Worker()
    with FakeApi() as api:
        async with served(worker) as port, controller(api) as running:
            put_pod(api, "w-0", port)
            await running.sees("w-0", "READY")
            worker.silent = True
            await until(
                lambda: (running.metric("worker_silence_seconds", worker="w-0") or 0) > 2, "it is silent"
            )
            assert not deletions(api)
            api.change(f"{PODS}/w-0", unready)
            await until(lambda: deletions(api), "the pod is deleted")


async def test_a_worker_that_cannot_start_is_put_on_the_next_level_and_so_is_its_successor() -> None:
    worker = Worker()
    worker.status = pb.Status(
        state=pb.STATE_FAILED, fallback_levels=1, last_fault=pb.Fault(message="out of memory")
    )
    with FakeApi() as api:
        async with served(worker) as port, controller(api) as running:
            put_pod(api, "w-0", port)

            def level() -> str | None:
                found = api.get(f"{PODS}/w-0")
                return found and (found["metadata"].get("annotations") or {}).get(
                    "moebius.dev/fallback-level"
                )

            await until(lambda: level() == "1", "the level is set")
            found = api.get(f"{PODS}/w-0")
            assert found is not None
            why = found["metadata"]["annotations"]["moebius.dev/fallback-reason"]
            assert why == "its engine cannot be started: out of memory"
            await until(
                lambda: running.metric("worker_fallback_level", worker="w-0") == 1, "the level is shown"
            )
            worker.status = pb.Status(state=pb.STATE_READY, fallback_level=1, fallback_levels=1)
            await running.sees("w-0", "READY")
            api.remove(f"{PODS}/w-0")
            put_pod(api, "w-0", port, creationTimestamp="2026-01-01T00:00:09Z")
            await until(lambda: level() == "1", "the new pod has the level")
            api.remove(f"{PODS}/w-0")
            labels = {"controller-revision-hash": "b"}
            found["metadata"]["labels"] |= labels
            put_pod(
                api, "w-0", port, creationTimestamp="2026-01-01T00:00:19Z", labels=found["metadata"]["labels"]
            )
            await until(
                lambda: running.metric("worker_fallback_level", worker="w-0") == 0, "the level is forgotten"
            )
            assert level() is None


async def test_what_was_done_outlives_the_controller() -> None:
    worker = Worker(pb.STATE_FAILED)
    with FakeApi() as api:
        async with served(worker) as port:
            async with controller(api) as running:
                put_pod(api, "w-0", port)
                await until(
                    lambda: running.metric("worker_fallback_level", worker="w-0") == 1, "the level is set"
                )
                await until(lambda: api.get(CONFIG_MAP), "the state is kept")
            kept = json.loads((api.get(CONFIG_MAP) or {})["data"]["state.json"])
            assert kept["history"]["w-0"]["level"] == 1
            worker.status = pb.Status(state=pb.STATE_READY, fallback_level=1, fallback_levels=1)
            api.remove(f"{PODS}/w-0")
            put_pod(api, "w-0", port, creationTimestamp="2026-01-01T00:00:09Z")
            async with controller(api, "c-1"):
                await until(
                    lambda: ((api.get(f"{PODS}/w-0") or {})["metadata"].get("annotations") or {}).get(
                        "moebius.dev/fallback-level"
                    ),
                    "the next controller sets the level again",
                )


@pytest.mark.timed
async def test_of_two_controllers_one_acts_and_the_other_takes_over() -> None:
    workers = [Worker(), Worker()]
    with FakeApi() as api:
        async with served(workers[0]) as one, served(workers[1]) as two, AsyncExitStack() as stack:
            leader = await stack.enter_async_context(controller(api, "c-0", lease_duration=30))
            await until(lambda: leader.leads, "the only one leads")
            async with controller(api, "c-1", lease_duration=30) as other:
                put_pod(api, "w-0", one)
                put_pod(api, "w-1", two)
                await leader.sees("w-0", "READY")
                await other.sees("w-1", "READY")
                assert not other.leads
                assert other.metric("hands_off") == 1
                api.change(f"{PODS}/w-0", ended)
                await until(lambda: deletions(api), "the pod is deleted")
                await other.sees("w-0", "DEAD")
                await asyncio.sleep(0.5)
                assert len(deletions(api)) == 1
                await stack.aclose()
                # It was given back: nobody waits for it to run out.
                await until(lambda: other.leads, "the other leads", seconds=20)
                await asyncio.sleep(0.5)
                assert len(deletions(api)) == 1, "what the first leader did is not done again"
                api.change(f"{PODS}/w-1", ended)
                await until(lambda: len(deletions(api)) == 2, "the new leader acts")


async def test_while_the_api_server_is_away_nothing_is_done_and_nothing_breaks() -> None:
    worker = Worker()
    with FakeApi() as api:
        async with served(worker) as port, controller(api) as running:
            put_pod(api, "w-0", port)
            await running.sees("w-0", "READY")
            await until(lambda: running.leads, "it leads")
            api.go()
            await until(lambda: not running.leads, "it leads no more")
            await until(lambda: running.metric("hands_off") == 1, "it keeps its hands off")
            # Workers are asked on.
            worker.status = pb.Status(state=pb.STATE_FAILED, fallback_levels=3)
            await running.sees("w-0", "FAILED")
            assert (running.metric("discovery_age_seconds", kind="pods") or 0) > 1
            asked = len(api.asked)
            await asyncio.sleep(0.5)
            assert len(api.asked) == asked
            api.come()
            await until(
                lambda: running.metric("worker_fallback_level", worker="w-0"), "it acts when it is back"
            )


async def test_an_action_that_fails_is_tried_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    with FakeApi() as api:
        async with served(worker) as port, controller(api) as running:
            put_pod(api, "w-0", port)
            await running.sees("w-0", "READY")
            carry_out = running.driver._actions.carry_out
            failures = [client.ApiException(500, "no"), TimeoutError(), client.ApiException(429, "slowly")]

            def fails_at_first(action: Action, pod: Pod, node: Node | None) -> None:
                if failures:
                    raise failures.pop()
                carry_out(action, pod, node)

            monkeypatch.setattr(running.driver._actions, "carry_out", fails_at_first)
            api.change(f"{PODS}/w-0", ended)
            await until(lambda: events(api), "it is done")
            await until(
                lambda: running.metric("actions_total", action="replace", trouble="ended") == 1,
                "it is counted",
            )
            assert running.metric("api_errors_total", call="Replace") == 3
            assert len(deletions(api)) == len(events(api)) == 1


async def test_who_leads_no_more_does_not_go_on_with_what_was_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeApi() as api:
        for number in range(4 * CALLS):
            put_pod(api, f"w-{number}", 1)
            api.change(f"{PODS}/w-{number}", ended)
        async with controller(api) as running:
            begun: list[str] = []

            def slow(action: Action, *_: object) -> None:
                """While it waits for the API, another one takes the lease."""
                begun.append(action.worker)
                time.sleep(0.2)
                monkeypatch.setattr(Lease, "leading", False)

            monkeypatch.setattr(running.driver._actions, "carry_out", slow)
            await until(lambda: begun, "it acts")
            await until(lambda: running.metric("hands_off") == 1, "it stops")
            await asyncio.sleep(0.5)
            assert len(begun) <= CALLS


async def test_another_pod_of_the_name_is_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    with FakeApi() as api:
        async with served(worker) as port, controller(api) as running:
            put_pod(api, "w-0", port)
            await running.sees("w-0", "READY")
            seen = running.driver._pods.objects()
            api.remove(f"{PODS}/w-0")
            put_pod(api, "w-0", port, creationTimestamp="2026-01-01T00:00:09Z")
            # What the controller sees is of before.
            (uid,) = seen
            dead = {uid: replace(seen[uid], phase="Failed", ready=False)}
            monkeypatch.setattr(running.driver._pods, "objects", lambda: dead)
            await until(lambda: deletions(api), "it is tried")
            assert deletions(api)[0][1]["preconditions"] == {"uid": uid}
            found = api.get(f"{PODS}/w-0")
            assert found is not None
            assert "deletionTimestamp" not in found["metadata"]
            assert not events(api)


async def test_a_node_that_lost_its_device_is_marked_cordoned_and_told_of() -> None:
    worker = Worker()
    with FakeApi() as api:
        put_node(api)
        async with served(worker) as port, controller(api, cordon=True) as running:
            put_pod(api, "w-0", port)
            await running.sees("w-0", "READY")
            worker.status = pb.Status(
                state=pb.STATE_RESTARTING,
                last_fault=pb.Fault(
                    reason=pb.REASON_GPU_FAULT,
                    message="CUDA error: the GPU has fallen off the bus",
                    time_ms=2**42,
                ),
            )
            await until(lambda: deletions(api), "the worker leaves")
            node = api.get(f"{NODES}/node-0")
            assert node is not None
            assert node["metadata"]["labels"]["moebius.dev/gpu-fault"] == "the-GPU-has-fallen-off-the-bus"
            assert "fallen off the bus" in node["metadata"]["annotations"]["moebius.dev/gpu-fault-text"]
            assert node["spec"]["unschedulable"] is True
            await until(lambda: running.metric("marked_nodes") == 1, "it is counted")
            told = [(reason, about) for reason, about, _ in events(api)]
            assert ("WorkerNodeMarked", "node-0") in told


async def test_a_pod_on_a_lost_node_is_removed_without_waiting_for_it() -> None:
    with FakeApi() as api:
        put_node(api, ready="Unknown")
        async with controller(api):
            put_pod(api, "w-0", 1)
            api.change(
                f"{PODS}/w-0", lambda one: one["metadata"].update(deletionTimestamp="2026-01-01T00:01:00Z")
            )
            await until(lambda: deletions(api), "it is removed")
            assert deletions(api)[0][1]["gracePeriodSeconds"] == 0
            assert api.get(f"{PODS}/w-0") is None


async def test_without_rights_to_nodes_the_rest_is_done() -> None:
    worker = Worker()
    with FakeApi() as api:
        async with served(worker) as port, controller(api, watch_nodes=False) as running:
            put_pod(api, "w-0", port)
            await running.sees("w-0", "READY")
            worker.status.last_fault.CopyFrom(
                pb.Fault(reason=pb.REASON_GPU_FAULT, message="Xid 79", time_ms=2**42)
            )
            asked = worker.asked
            await until(lambda: worker.asked > asked + 1, "its fault is known")
            api.change(f"{PODS}/w-0", ended)
            await until(lambda: deletions(api), "it is deleted")
            assert not any(one.path.startswith(NODES) for one in api.asked)


async def test_workers_that_speak_tls_are_asked_so_and_files_that_change_are_read(tmp_path: Path) -> None:
    first, second = authority(tmp_path, "first"), authority(tmp_path, "second")
    used = signed(tmp_path, second, "used")
    credentials = grpc.ssl_server_credentials([(used.key.read_bytes(), used.cert.read_bytes())])
    trusted = tmp_path / "trusted.pem"
    shutil.copy(first.cert, trusted)
    tls = WorkerTls(trusted, name="localhost")
    worker = Worker()
    with FakeApi() as api:
        async with served(worker, credentials) as port, controller(api, tls=tls) as running:
            put_pod(api, "w-0", port)
            await running.sees("w-0", "SILENT")
            await asyncio.sleep(1)
            assert not worker.asked
            shutil.copy(second.cert, trusted)
            await running.sees("w-0", "READY")


async def test_hundreds_of_workers_are_asked_side_by_side() -> None:
    """Half of them hang; the others are heard all the same."""
    well, hung = Worker(), Worker()
    hung.silent = True
    # Who waits for one that hangs waits for longer than the test does.
    rhythm = Rhythm(interval=1.0, timeout=90.0)
    with FakeApi() as api:
        async with served(well) as one, served(hung) as two, controller(api, rhythm=rhythm) as running:
            for number in range(100):
                put_pod(api, f"well-{number}", one)
                put_pod(api, f"hung-{number}", two)
            for number in range(100):
                await running.sees(f"well-{number}", "READY")
            begun, asked = time.monotonic(), well.asked
            await until(lambda: well.asked >= asked + 300, "they are asked again and again")
            silences = [
                running.metric("worker_silence_seconds", worker=f"well-{number}") for number in range(100)
            ]
            assert max(silence or 0.0 for silence in silences) < time.monotonic() - begun
            assert not deletions(api)
