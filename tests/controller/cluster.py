"""A controller over the API server in miniature, with workers that answer as a test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from moebius_controller.control import Controller
from moebius_controller.kubernetes.driver import Cluster, PodDriver
from moebius_controller.kubernetes.pulses import Pulses
from moebius_controller.metrics import ControllerMetrics
from moebius_controller.policy import Policy
from moebius_controller.probe import Rhythm
from moebius_controller.settings import ControllerSettings
from moebius_proto.channel import WorkerTls, keep_grpc
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tests.cluster_fakes import PODS, FakeApi, pod
from tests.controller.processes import impatient
from tests.ports import free_port
from tests.waiting import until

LABELS = {
    "app.kubernetes.io/name": "moebius",
    "app.kubernetes.io/component": "worker",
    "app.kubernetes.io/instance": "m",
    "moebius.dev/model": "m",
    "controller-revision-hash": "a",
}
EVENTS = "/api/v1/namespaces/default/events"
CONFIG_MAP = "/api/v1/namespaces/default/configmaps/moebius-controller"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/moebius-controller"
NODES = "/api/v1/nodes"
# A second of silence is enough, and pods that ended are cleared away soon.
POLICY = Policy(impatient(silent=1, ended=1, failed=2, back_off=5), restart_delay=0.1, retry_delay=600)
OFTEN = Rhythm(interval=0.2, timeout=2.0)
LONG_AGO = "2026-01-01T00:00:00Z"


class Worker(WorkerServicer):
    """Answers with `status`, or not at all."""

    def __init__(self, state: pb.State = pb.STATE_READY) -> None:
        self.status = pb.Status(state=state, fallback_levels=3)
        self.silent = False
        self.asked = 0

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.Status:
        self.asked += 1
        if self.silent:
            await asyncio.sleep(3600)
        return self.status


@asynccontextmanager
async def served(worker: Worker, credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[int]:
    """On loopback; yields the port."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    add_WorkerServicer_to_server(worker, server)
    address = f"127.0.0.1:{free_port()}"
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@dataclass
class Running:
    """A controller that runs."""

    driver: PodDriver
    registry: CollectorRegistry
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"moebius_controller_{name}", labels)

    @property
    def leads(self) -> bool:
        return self.metric("leader") == 1

    async def sees(self, worker: str, state: str) -> None:
        await until(
            lambda: self.metric("worker_state", worker=worker, state=state) == 1, f"{worker} is {state}"
        )


@asynccontextmanager
async def controller(
    api: FakeApi,
    name: str = "c-0",
    policy: Policy = POLICY,
    tls: WorkerTls | None = None,
    rhythm: Rhythm = OFTEN,
    lease_duration: float = 3,
    **settings: Any,
) -> AsyncIterator[Running]:
    keep_grpc()
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    if tls is not None:
        settings |= {"worker_tls_ca": tls.ca, "worker_tls_name": tls.name}
    chosen = ControllerSettings(driver="kubernetes", identity=name, lease_duration=lease_duration, **settings)
    driver = PodDriver(Cluster(api.client(), api.client(), "default"), chosen, metrics)
    driver._pulses = Pulses(chosen.worker_tls, rhythm)
    running = Running(driver, registry)
    async with driver:
        looking = asyncio.create_task(
            Controller(driver, policy, driver.memory, metrics).run(0.2, running.stop)
        )
        try:
            yield running
        finally:
            running.stop.set()
            driver.wake()
            await looking


def put_pod(api: FakeApi, name: str, port: int, **metadata: Any) -> dict[str, Any]:
    """One that is ready, on node-0; of long ago, so that its age is none of the test's business."""
    metadata = {"creationTimestamp": LONG_AGO, "labels": LABELS, **metadata}
    return api.put(PODS, pod(name, "127.0.0.1", port=port, **metadata))


def put_node(api: FakeApi, name: str = "node-0", ready: str = "True") -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": ready}]
    return api.put(
        NODES,
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name},
            "status": {"conditions": conditions},
        },
    )


def unready(obj: dict[str, Any]) -> None:
    """As the kubelet says when its probe fails."""
    obj["status"]["conditions"] = [{"type": "Ready", "status": "False"}]


def ended(obj: dict[str, Any]) -> None:
    unready(obj)
    obj["status"] |= {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"}


def deletions(api: FakeApi) -> list[tuple[str, dict[str, Any]]]:
    """Names of pods whose deletion was asked for, and how."""
    return [
        (one.path.rpartition("/")[2], one.body)
        for one in api.asked
        if one.method == "DELETE" and one.path.startswith(PODS)
    ]


def events(api: FakeApi, namespace: str = "default") -> list[tuple[str, str, str]]:
    """Of each: its reason, what it is about, and its message."""
    return [
        (one["reason"], one["involvedObject"]["name"], one["message"])
        for one in api.objects(f"/api/v1/namespaces/{namespace}/events")
    ]
