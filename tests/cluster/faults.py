"""What scenarios do to a cluster. Each event is a function; those that need a lab say so."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kubernetes import client

from tests.cluster.cluster import NAMESPACE, Cluster, Pod, run, until
from tests.cluster.release import FULLNAME, MODEL

Act = Callable[[Cluster], Awaitable[None]]
ENGINE = "moebius_worker.engine"


@dataclass(frozen=True)
class Fault:
    act: Act
    # Whether it takes what only a lab has: its container runtime, its network, its daemons.
    lab: bool = False


def busiest(cluster: Cluster) -> Pod:
    """The worker with most running requests; between two requests of each client there may be none."""

    def running(pod: Pod) -> float:
        return cluster.metrics(pod.name, 9401).get("moebius_worker_requests_running", 0)

    deadline = time.monotonic() + 15
    while True:
        workers = [pod for pod in cluster.pods("worker") if pod.ready and not pod.ending]
        most, _, pod = max((running(pod), pod.name, pod) for pod in workers)
        if most > 0:
            return pod
        assert time.monotonic() < deadline, f"it would hit an idle worker: {workers}"


# In a container's shell: does something with the process ids of its engine.
def _engines(command: str) -> str:
    return f"for p in /proc/[0-9]*; do if grep -q {ENGINE} $p/cmdline 2>/dev/null; then {command}; fi; done"


async def kill_engine(cluster: Cluster) -> None:
    pod = await asyncio.to_thread(busiest, cluster)
    await asyncio.to_thread(cluster.exec, pod.name, "sh", "-c", _engines("kill -9 ${p#/proc/}"), check=False)


def _signal_container(number: signal.Signals) -> Act:
    async def act(cluster: Cluster) -> None:
        pod = await asyncio.to_thread(busiest, cluster)
        await asyncio.to_thread(run, "ctr", "tasks", "kill", "-s", number.name, pod.container)

    return act


async def delete_pod(cluster: Cluster) -> None:
    pod = await asyncio.to_thread(busiest, cluster)
    await asyncio.to_thread(cluster.core.delete_namespaced_pod, pod.name, NAMESPACE)


async def kill_pod(cluster: Cluster) -> None:
    """Without a grace period, as when its node is gone."""
    pod = await asyncio.to_thread(busiest, cluster)
    await asyncio.to_thread(cluster.core.delete_namespaced_pod, pod.name, NAMESPACE, grace_period_seconds=0)


async def evict(cluster: Cluster) -> None:
    pod = await asyncio.to_thread(busiest, cluster)
    version = "policy/v1" if cluster.version() >= (1, 22) else "policy/v1beta1"
    body = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": pod.name, "namespace": NAMESPACE}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod.name}/eviction"
    await asyncio.to_thread(run, "kubectl", "create", "--raw", path, "-f", "-", stdin=json.dumps(body))


# Takes memory, in many small processes of which none is the largest, until the kernel has killed the engine.
_HOG = f"""
import glob, os, signal, time
def engines():
    found = set()
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if b"{ENGINE}" in open(path, "rb").read().split(bytes(1)):
                found.add(path)
        except OSError:
            pass
    return found
victims, hogs = engines(), []
assert victims
while victims & engines() and len(hogs) < 100:
    hogs.append(os.fork())
    if not hogs[-1]:
        held = bytearray(os.urandom(4096) * 8192)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
for one in hogs:
    os.kill(one, signal.SIGKILL)
"""


async def out_of_memory(cluster: Cluster) -> None:
    pod = await asyncio.to_thread(busiest, cluster)
    await asyncio.to_thread(cluster.exec, pod.name, "python3", "-c", _HOG, check=False)


async def kill_leader(cluster: Cluster) -> None:
    lease = client.CoordinationV1Api(cluster.api).read_namespaced_lease(f"{FULLNAME}-controller", NAMESPACE)
    holder = lease.spec.holder_identity
    (pod,) = (one for one in cluster.pods("controller") if one.name in holder)
    await asyncio.to_thread(cluster.core.delete_namespaced_pod, pod.name, NAMESPACE, grace_period_seconds=0)


async def stop_api_server(cluster: Cluster, seconds: float = 60) -> None:
    """It answers nobody for so long; connections stay open."""
    status = await asyncio.to_thread(run, str(cluster.lab), "status")
    found = re.search(r"^kube-apiserver +pid (\d+)", status, re.MULTILINE)
    assert found is not None, status
    pid = int(found[1])
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


async def kill_worker_without_api_server(cluster: Cluster) -> None:
    """Whom to strike is asked while there is somebody to ask."""
    pod = await asyncio.to_thread(busiest, cluster)
    away = asyncio.create_task(stop_api_server(cluster))
    await asyncio.sleep(2)
    await asyncio.to_thread(run, "ctr", "tasks", "kill", "-s", "SIGKILL", pod.container)
    await away


async def partition(cluster: Cluster, seconds: float = 20) -> None:
    """Nothing passes between one gateway and the busiest worker, in either direction."""
    worker = await asyncio.to_thread(busiest, cluster)
    gateways = [pod for pod in cluster.pods("gateway") if not pod.ending]
    async with _dropped([(gateway.ip, worker.ip) for gateway in gateways]):
        await asyncio.sleep(seconds)


@asynccontextmanager
async def _dropped(pairs: list[tuple[str | None, str | None]]) -> AsyncIterator[None]:
    rules = [
        ("FORWARD", "-s", str(one), "-d", str(other), "-j", "DROP")
        for pair in pairs
        for one, other in (pair, pair[::-1])
    ]
    for rule in rules:
        await asyncio.to_thread(run, "iptables", "-I", *rule)
    try:
        yield
    finally:
        for rule in rules:
            await asyncio.to_thread(run, "iptables", "-D", *rule)


def restart(kind: str, name: str) -> Act:
    """A rolling restart; done when all pods are new."""

    async def act(cluster: Cluster) -> None:
        target = ("--namespace", NAMESPACE, f"{kind}/{FULLNAME}-{name}")
        await asyncio.to_thread(run, "kubectl", "rollout", "restart", *target)
        await asyncio.to_thread(run, "kubectl", "rollout", "status", "--timeout", "240s", *target)

    return act


async def all_ready(cluster: Cluster, timeout: float = 180) -> list[Pod]:
    """The workers, once all are ready and none is ending."""

    def ready() -> list[Pod] | None:
        pods = cluster.pods("worker")
        return pods if pods and all(pod.ready and not pod.ending for pod in pods) else None

    pods = await until(ready, "all workers are ready", timeout)
    assert isinstance(pods, list)
    return pods


FAULTS: dict[str, Fault] = {
    "kill engine": Fault(kill_engine),
    "kill worker": Fault(_signal_container(signal.SIGKILL), lab=True),
    "stop worker": Fault(_signal_container(signal.SIGSTOP), lab=True),
    "delete pod": Fault(delete_pod),
    "kill pod": Fault(kill_pod),
    "evict": Fault(evict),
    "out of memory": Fault(out_of_memory),
    "kill leader": Fault(kill_leader),
    "stop API server": Fault(stop_api_server, lab=True),
    "kill worker without API server": Fault(kill_worker_without_api_server, lab=True),
    "partition": Fault(partition, lab=True),
    "restart gateways": Fault(restart("deployment", "gateway")),
    "restart workers": Fault(restart("statefulset", MODEL)),
}
