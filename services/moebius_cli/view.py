"""What can be seen of a running stack, gathered from its state directory, its gateway and its workers."""

import asyncio
from dataclasses import dataclass

import httpx

from moebius_cli.api import client
from moebius_cli.errors import CliError
from moebius_cli.state_dir import StateDir
from moebius_controller.events import Event
from moebius_controller.probe import Probe, state_of
from moebius_controller.spec import StackFileError, StackSpec, WorkerSpec, read_stack
from moebius_controller.state_file import ControllerState, ProcessView, StateFileError, load_state

PROBE_TIMEOUT = 2.0


@dataclass(frozen=True)
class GatewayView:
    url: str
    pid: int
    ready: bool
    # Why it is not ready, as it says itself.
    detail: str


@dataclass(frozen=True)
class WorkerView:
    """`state` is the worker's own, or UNREACHABLE."""

    name: str
    listen: str
    log: str
    state: str
    # Times the controller started its process.
    starts: int
    pid: int = 0
    engine_pid: int = 0
    incarnation: str = ""
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    kv_pages_used: int = 0
    kv_pages_cached: int = 0
    kv_pages_total: int = 0
    engine_restarts: int = 0
    load_phase: str = ""
    load_bytes_done: int = 0
    load_bytes_total: int = 0
    last_fault: str = ""
    fallback_level: int = 0
    fallback_name: str = ""


@dataclass(frozen=True)
class StackView:
    running: bool
    model: str = ""
    gateway: GatewayView | None = None
    controller_pid: int = 0
    workers: tuple[WorkerView, ...] = ()
    # What the controller did and why, the oldest first.
    events: tuple[Event, ...] = ()


async def view_stack(state_dir: StateDir) -> StackView:
    """Raises CliError if the state directory cannot be read."""
    record = state_dir.running()
    if record is None:
        return StackView(running=False)
    stack, control = read_state(state_dir)
    gateway, workers = await asyncio.gather(
        view_gateway(record.url, record.gateway_pid), view_workers(stack, control)
    )
    events = control.events if control else ()
    return StackView(True, record.model, gateway, record.controller_pid, workers, events)


def read_state(state_dir: StateDir) -> tuple[StackSpec, ControllerState | None]:
    """Raises CliError."""
    try:
        return read_stack(state_dir.stack_file), load_state(state_dir.controller_file)
    except (StackFileError, StateFileError) as error:
        raise CliError(f"The state directory is damaged: {error}") from error


async def view_workers(stack: StackSpec, control: ControllerState | None) -> tuple[WorkerView, ...]:
    """Asks all workers at once."""
    processes = control.processes if control else {}
    return tuple(
        await asyncio.gather(
            *(_view_worker(spec, processes.get(spec.name, ProcessView(0))) for spec in stack.workers)
        )
    )


async def _view_worker(spec: WorkerSpec, process: ProcessView) -> WorkerView:
    probe = Probe(spec.listen)
    try:
        status = await probe.status(PROBE_TIMEOUT)
    finally:
        await probe.close()
    # Whoever else answers at this address is not our worker.
    if status is None or status.pid != process.pid:
        return WorkerView(
            spec.name,
            spec.listen,
            str(spec.log),
            "UNREACHABLE",
            process.run,
            pid=process.pid or 0,
            last_fault=process.death or "",
        )
    return WorkerView(
        spec.name,
        spec.listen,
        str(spec.log),
        state_of(status).value,
        process.run,
        status.pid,
        status.engine_pid,
        status.incarnation,
        status.running,
        status.waiting,
        status.max_running,
        status.kv_pages_used,
        status.kv_pages_cached,
        status.kv_pages_total,
        status.restarts,
        status.load.phase,
        status.load.bytes_done,
        status.load.bytes_total,
        status.last_fault.message,
        status.fallback_level,
        status.fallback_name,
    )


async def view_gateway(url: str, pid: int) -> GatewayView:
    try:
        async with client(url) as gateway:
            response = await gateway.get("/readyz", timeout=PROBE_TIMEOUT)
    except httpx.HTTPError as error:
        return GatewayView(url, pid, False, f"it does not answer: {error!r}")
    return GatewayView(url, pid, response.is_success, _reasons(response))


def _reasons(response: httpx.Response) -> str:
    """Why the gateway is not ready, as it says itself."""
    try:
        return "; ".join(response.json().get("reasons", ()))
    except (ValueError, AttributeError, TypeError):
        return response.text
