"""What `moebius up` starts: command lines, ports, files."""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius_cli.errors import CliError
from moebius_cli.ports import HOST
from moebius_cli.state_dir import StateDir
from moebius_common.cpus import cpu_count
from moebius_controller.spec import StackSpec, WorkerSpec
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.sim.vocabulary import SIM_NAME

_THREADS = "MOEBIUS_WORKER_THREADS"


@dataclass(frozen=True)
class UpOptions:
    """What the user asked for; `moebius up --help` explains each."""

    workers: int
    model: str | None
    host: str
    port: int
    device: str
    log_format: str
    state_dir: StateDir
    question: str
    once: bool
    engine: str = "model"
    # The first of the ports for Prometheus; None: no metrics are served.
    metrics_port: int | None = None
    # None: the model's own name.
    served_model_name: str | None = None

    def metrics_flag(self, flag: str, place: int) -> tuple[str, ...]:
        """Gateway, controller and workers have places 0, 1, 2 and on."""
        if self.metrics_port is None:
            return ()
        return flag, f"127.0.0.1:{self.metrics_port + place}"

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def check_port(host: str, port: int) -> None:
    """Raises CliError if the gateway could not listen there."""
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        socket.create_server(address[:2], family=family).close()
    except socket.gaierror as error:
        raise CliError(
            f"Cannot listen on {host}:{port} ({error.strerror}). Give an address of this machine: 127.0.0.1, "
            "or 0.0.0.0 to let other machines in."
        ) from error
    except OSError as error:
        raise CliError(
            f"Cannot listen on {host}:{port} ({error.strerror}). Stop what uses it, or choose another port: "
            f"moebius up --port {port + 1 if 1024 <= port < 65535 else 8080}"
        ) from error


def model_name(options: UpOptions, checkpoint: Checkpoint | None) -> str:
    """What clients call the model. No checkpoint: a simulated model."""
    return options.served_model_name or (SIM_NAME if checkpoint is None else checkpoint.name)


def plan_stack(options: UpOptions, checkpoint: Checkpoint | None, ports: Sequence[int]) -> StackSpec:
    """A worker on each of `ports`, with the CPUs shared out among them. No checkpoint: a simulated model."""
    model = () if checkpoint is None else ("--model", str(checkpoint.path.absolute()))
    # One word: a name may begin with a dash.
    served = f"--served-model-name={model_name(options, checkpoint)}"
    threads = os.environ.get(_THREADS, str(max(1, cpu_count() // len(ports))))
    workers = []
    for number, port in enumerate(ports):
        name, listen = f"worker-{number}", f"{HOST}:{port}"
        argv = (
            *(sys.executable, "-m", "moebius_worker"),
            *("--engine", options.engine, *model, served),
            *("--listen", listen, "--device", options.device),
            *("--threads", threads, "--log-format", options.log_format),
            *options.metrics_flag("--metrics-listen", 2 + number),
        )
        workers.append(WorkerSpec(name, argv, listen, options.state_dir.log(name)))
    return StackSpec(tuple(workers))


def gateway_command(options: UpOptions, stack: StackSpec) -> Sequence[str]:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return (
        *(sys.executable, "-m", "moebius_gateway", "--listen", f"{host}:{options.port}"),
        *("--workers", ",".join(worker.listen for worker in stack.workers)),
        *("--log-format", options.log_format),
        *options.metrics_flag("--admin-listen", 0),
    )


def controller_command(options: UpOptions, stack_file: Path) -> Sequence[str]:
    return (
        *(sys.executable, "-m", "moebius_controller", "--stack", str(stack_file)),
        *("--log-format", options.log_format),
        *options.metrics_flag("--metrics-listen", 1),
    )
