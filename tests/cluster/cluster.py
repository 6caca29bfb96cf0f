"""The cluster as the tests see it: objects as plain data, commands in pods, metrics of pods."""

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kubernetes import client, config

NAMESPACE = "moebius-test"


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str
    ip: str | None
    ready: bool
    ending: bool
    restarts: int
    # Without the runtime's name before it.
    container: str
    node: str


# What would be others after a death: by pod, by pod and container, or by these and engine.
Lives = set[tuple[str, int, float]]


def run(*command: str, check: bool = True, stdin: str | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, input=stdin)
    assert not check or done.returncode == 0, f"{' '.join(command[:6])} ...: {done.stdout}{done.stderr}"
    return done.stdout


class Cluster:
    def __init__(self) -> None:
        config.load_kube_config()
        self.api = client.ApiClient()
        self.core = client.CoreV1Api(self.api)
        # A lab's own means: its container runtime, its network, its daemons.
        self.lab = os.environ.get("LAB_DIR") and os.environ.get("MOEBIUS_LAB")

    def pods(self, component: str) -> list[Pod]:
        listed = self.core.list_namespaced_pod(
            NAMESPACE, label_selector=f"app.kubernetes.io/component={component}"
        )
        return [_pod(one) for one in listed.items]

    def exec(self, pod: str, *command: str, check: bool = True) -> str:
        return run("kubectl", "--namespace", NAMESPACE, "exec", pod, "--", *command, check=check)

    def metrics(self, pod: str, port: int) -> dict[str, float]:
        """By name, summed over labels; empty if it does not answer."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}:{port}/proxy/metrics"
        sums: dict[str, float] = {}
        for name, value in re.findall(
            r"^(\w[\w:]*)(?:\{.*\})? (\S+)$", run("kubectl", "get", "--raw", path, check=False), re.M
        ):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def lives(self, kind: str) -> Lives:
        """Of workers: pods; or containers, which die with those; or engines, which die with both."""

        def engines(pod: Pod) -> float:
            name = "moebius_worker_engine_restarts_total"
            return self.metrics(pod.name, 9401).get(name, -1) if kind == "engines" else 0

        pods = self.pods("worker")
        return {(pod.uid, pod.restarts if kind != "pods" else 0, engines(pod)) for pod in pods}

    def version(self) -> tuple[int, int]:
        code = client.VersionApi(self.api).get_code()
        return int(code.major), int(re.sub(r"\D", "", code.minor))


def _pod(one: Any) -> Pod:
    status = (one.status.container_statuses or [None])[0]
    conditions = {condition.type: condition.status for condition in one.status.conditions or ()}
    return Pod(
        one.metadata.name,
        one.metadata.uid,
        one.status.pod_ip,
        conditions.get("Ready") == "True",
        one.metadata.deletion_timestamp is not None,
        status.restart_count if status else 0,
        (status.container_id or "").partition("://")[2] if status else "",
        one.spec.node_name or "",
    )


async def until(condition: Callable[[], Any], what: str, timeout: float, interval: float = 0.2) -> Any:
    """Calls `condition()` in a thread, again and again, until it is true; returns its value."""
    deadline = time.monotonic() + timeout
    while True:
        value = await asyncio.to_thread(condition)
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        await asyncio.sleep(interval)


def helm(*arguments: str, values: dict[str, Any] | None = None) -> str:
    with_values: Sequence[str] = () if values is None else ("--values", "-")
    return run(
        "helm",
        "--namespace",
        NAMESPACE,
        *arguments,
        *with_values,
        stdin=None if values is None else json.dumps(values),
    )
