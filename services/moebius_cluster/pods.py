"""Pods as plain data: what decisions need of the objects that the Kubernetes API sends."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

# Labels of a StatefulSet's pods: the revision of the template that a pod was made from.
REVISION_LABEL = "controller-revision-hash"


class ContainerState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod, as the kubelet last said. Times are Unix times."""

    name: str
    state: ContainerState = ContainerState.WAITING
    # Of this state: "ContainerCreating", "CrashLoopBackOff", "OOMKilled" ...; empty while it runs.
    reason: str = ""
    message: str = ""
    # Of this state: set when it is terminated.
    exit_code: int | None = None
    # Of the process that runs, or that ran last in this state; None while it waits.
    started_at: float | None = None
    ready: bool = False
    # Processes before this one, and how the last of them ended; empty and None if there was none.
    restart_count: int = 0
    last_reason: str = ""
    last_message: str = ""
    last_exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod. Times are Unix times; what the API left out is empty."""

    name: str
    uid: str
    namespace: str = ""
    # Empty until it is scheduled.
    node: str = ""
    # Empty until it has one; a pod that ended may have none any more.
    ip: str = ""
    phase: str = ""
    # Why, of the whole pod: "Evicted", "UnexpectedAdmissionError", "NodeLost" ...
    reason: str = ""
    message: str = ""
    created_at: float = 0.0
    # Set when its deletion was asked for: when its grace ends.
    deletion: float | None = None
    # Its condition Ready. A pod that is being deleted may keep it.
    ready: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    # In the order of the specification; those that the kubelet said nothing about yet wait.
    containers: tuple[Container, ...] = ()
    # By name, of all containers.
    ports: Mapping[str, int] = field(default_factory=dict)

    @property
    def revision(self) -> str:
        """Of the template that it was made from."""
        return self.labels.get(REVISION_LABEL, "")

    @property
    def over(self) -> bool:
        """Whether it ended and will not run again."""
        return self.phase in ("Succeeded", "Failed")

    def container(self, name: str) -> Container | None:
        return next((one for one in self.containers if one.name == name), None)

    def address(self, port: str) -> str | None:
        """host:port of the port named so; None while there is no such port, or no address."""
        if not self.ip or port not in self.ports:
            return None
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{host}:{self.ports[port]}"


def pod_of(raw: Mapping[str, Any]) -> Pod:
    """From the API's JSON. Raises KeyError and the like for what is no pod."""
    metadata, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    specified = spec.get("containers") or []
    told = {one["name"]: _container(one) for one in status.get("containerStatuses") or []}
    conditions = status.get("conditions") or []
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        namespace=metadata.get("namespace") or "",
        node=spec.get("nodeName") or "",
        ip=status.get("podIP") or "",
        phase=status.get("phase") or "",
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        created_at=_time(metadata.get("creationTimestamp")) or 0.0,
        deletion=_time(metadata.get("deletionTimestamp")),
        ready=any(one.get("type") == "Ready" and one.get("status") == "True" for one in conditions),
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        containers=tuple(told.get(one["name"]) or Container(one["name"]) for one in specified),
        ports={
            port["name"]: port["containerPort"]
            for one in specified
            for port in one.get("ports") or []
            if port.get("name")
        },
    )


def _container(raw: Mapping[str, Any]) -> Container:
    state, about = _state(raw.get("state"))
    _, last = _state(raw.get("lastState"))
    return Container(
        name=raw["name"],
        state=state,
        reason=about.get("reason") or "",
        message=about.get("message") or "",
        exit_code=about.get("exitCode"),
        started_at=_time(about.get("startedAt")),
        ready=bool(raw.get("ready")),
        restart_count=raw.get("restartCount") or 0,
        last_reason=last.get("reason") or "",
        last_message=last.get("message") or "",
        last_exit_code=last.get("exitCode"),
    )


def _state(raw: Mapping[str, Any] | None) -> tuple[ContainerState, Mapping[str, Any]]:
    """One of the three keys is there, or none, which the API's documentation says to be waiting."""
    for state in ContainerState:
        if (about := (raw or {}).get(state)) is not None:
            return state, about
    return ContainerState.WAITING, {}


def _time(raw: str | None) -> float | None:
    """Unix time of an RFC 3339 time, which the API gives in UTC."""
    if not raw:
        return None
    when = datetime.fromisoformat(raw)
    return when.replace(tzinfo=when.tzinfo or UTC).timestamp()
