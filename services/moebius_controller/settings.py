"""The controller's settings."""

import os
import socket
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import SettingsConfigDict

from moebius_common.address import Address
from moebius_common.logs import LogFormat
from moebius_common.settings import SEPARATED_BY_COMMAS, Seconds
from moebius_controller.policy import LADDER, PODS, PROCESSES, Policy, Rung
from moebius_controller.types import Step, Trouble
from moebius_proto.worker_tls import WorkerTlsSettings


class RungSettings(BaseModel):
    """A rung of the ladder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    when: Trouble
    step: Step
    seconds: float = Field(0.0, ge=0)
    times: int = Field(1, gt=0)


_LADDER = tuple(
    RungSettings(when=rung.when, step=rung.step, seconds=rung.seconds, times=rung.times) for rung in LADDER
)


class ControllerSettings(WorkerTlsSettings):
    """Keeps workers alive: watches them, restarts or replaces what died or hangs. --driver local starts the
    workers of a stack on this machine, too; on Kubernetes StatefulSets do."""

    model_config = SettingsConfigDict(env_prefix="MOEBIUS_CONTROLLER_", cli_prog_name="moebius-controller")

    driver: Literal["local", "kubernetes"] = Field(
        "local", description="What workers are: processes, or pods."
    )
    stack: Path | None = Field(
        None,
        description="With --driver local, the stack file: JSON that lists the workers. controller.json is "
        "written next to it.",
    )
    metrics_listen: Address | None = Field(
        None,
        description="host:port of the Prometheus metrics, /healthz and /readyz. Left out: none is served.",
    )
    log_format: LogFormat = Field("console", description="How log lines look on stderr.")
    look_interval: Seconds | None = Field(
        None,
        description="Seconds between two looks at the workers. Left out: 0.25 for processes, 1 for pods.",
    )
    stop_grace: Seconds = Field(
        35.0, description="Seconds that workers have to end after SIGTERM before they are killed (local)."
    )

    namespace: str | None = Field(
        None, description="Where the pods are. Left out: the controller's own namespace."
    )
    selector: str = Field(
        "app.kubernetes.io/name=moebius,app.kubernetes.io/component=worker",
        description="The label selector of the workers' pods.",
    )
    lease_name: str = Field(
        "moebius-controller", description="The Lease whose holder acts; others only watch."
    )
    state_configmap: str = Field(
        "moebius-controller", description="The ConfigMap that keeps what was seen and done."
    )
    identity: str = Field(
        default_factory=lambda: f"{socket.gethostname()}_{os.getpid()}",
        description="What the Lease calls this controller; no two may have the same.",
    )
    lease_duration: float = Field(
        15.0, ge=3, description="Seconds after which a leader that says nothing is replaced."
    )
    watch_nodes: bool = Field(
        True,
        description="Whether nodes may be read and marked, which takes rights in the whole cluster. Without, "
        "pods on lost nodes and broken GPUs are left there.",
    )
    cordon: bool = Field(
        False, description="Whether a node that is marked is cordoned as well: nothing is placed there then."
    )
    node_fault_conditions: Annotated[tuple[str, ...], *SEPARATED_BY_COMMAS] = Field(
        ("GPUUnhealthy", "GpuUnhealthy", "XidCriticalError"),
        description="Conditions of nodes that, when True, say that a GPU is broken, as node-problem-detector "
        "and the like set them; separated by commas.",
    )
    max_api_age: float = Field(
        60.0,
        gt=30,
        description="Seconds without a word from the API server after which nothing is done; longer than a "
        "watch in which nothing happens is silent.",
    )

    ladder: tuple[RungSettings, ...] = Field(
        _LADDER,
        description="What is done when: JSON list of {when, step, seconds, times}; of the rungs that hold, "
        "the first whose step can be taken is. docs/failure-modes.md explains each.",
    )
    restart_delay: Seconds | None = Field(
        None,
        description="Seconds from a death to the restart or replacement; doubles with each further death in "
        "a row. Left out: 0.25 for processes, 1 for pods.",
    )
    max_restart_delay: Seconds | None = Field(
        None, description="Limit of that delay. Left out: 30 for processes, 60 for pods."
    )
    healthy_after: Seconds = Field(
        PROCESSES.healthy_after,
        description="Seconds of life after which the deaths before it are forgotten.",
    )
    retry_delay: Seconds | None = Field(
        None,
        description="Seconds that a worker which was given up is left alone. Left out: 60 for processes, 600 "
        "for pods.",
    )
    min_ready: int = Field(
        PROCESSES.min_ready,
        ge=0,
        description="Workers of a model that are to stay ready: one that serves is moved only if more are.",
    )
    rollout_patience: Seconds = Field(
        PROCESSES.rollout_patience,
        description="Seconds that pods of a workload whose pods are being replaced are left to that.",
    )
    max_marked_nodes: int = Field(
        PROCESSES.max_marked_nodes, ge=0, description="Nodes that may be marked at the same time."
    )
    fault_memory: Seconds = Field(
        PROCESSES.fault_memory, description="Seconds for which an error of a GPU speaks against its node."
    )

    @model_validator(mode="after")
    def _complete(self) -> "ControllerSettings":
        if self.driver == "local" and self.stack is None:
            raise ValueError("--driver local needs --stack")
        return self

    def policy(self) -> Policy:
        usual = PROCESSES if self.driver == "local" else PODS
        return Policy(
            ladder=tuple(Rung(rung.when, rung.step, rung.seconds, rung.times) for rung in self.ladder),
            restart_delay=self.restart_delay or usual.restart_delay,
            max_restart_delay=self.max_restart_delay or usual.max_restart_delay,
            healthy_after=self.healthy_after,
            retry_delay=self.retry_delay or usual.retry_delay,
            min_ready=self.min_ready,
            rollout_patience=self.rollout_patience,
            max_marked_nodes=self.max_marked_nodes,
            fault_memory=self.fault_memory,
        )
