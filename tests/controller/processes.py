"""Workers as real, small processes, under a controller in this process or in one of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry

from moebius_controller.control import Controller
from moebius_controller.events import Event, What
from moebius_controller.local.driver import LocalDriver
from moebius_controller.metrics import ControllerMetrics
from moebius_controller.policy import LADDER, Policy, Rung
from moebius_controller.spec import StackSpec, WorkerSpec, write_stack
from moebius_controller.state_file import ControllerState, FileMemory, ProcessView, load_state
from moebius_controller.types import Step, Trouble
from tests.ports import free_port
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).parents[2]


def standin(folder: Path, name: str = "worker-0") -> WorkerSpec:
    """A worker that answers GetStatus as a ready and idle one does."""
    port = free_port()
    argv = (sys.executable, "-m", "tests.gateway.worker_standin", "--port", str(port))
    return WorkerSpec(name, argv, f"127.0.0.1:{port}", folder / f"{name}.log", {"PYTHONPATH": str(ROOT)})


def shell(folder: Path, script: str, name: str = "worker-0") -> WorkerSpec:
    """A process that answers nothing."""
    return WorkerSpec(name, ("sh", "-c", script), f"127.0.0.1:{free_port()}", folder / f"{name}.log")


@dataclass(frozen=True)
class Controlled:
    """Workers under a controller, as its state file shows them."""

    state_file: Path

    def state(self) -> ControllerState:
        return load_state(self.state_file) or ControllerState(0)

    def view(self, name: str = "worker-0") -> ProcessView:
        return self.state().processes.get(name, ProcessView(0))

    def told(self, what: What) -> list[Event]:
        return [event for event in self.state().events if event.what is what]

    async def happened(self, what: What, times: int = 1, name: str = "worker-0") -> list[Event]:
        """Waits until it happened so many times to the worker."""

        def events() -> list[Event]:
            return [event for event in self.told(what) if event.worker == name]

        await until(lambda: len(events()) >= times, f"{name} {what} {times} times, in {self.state_file}")
        return events()

    async def ready(self, run: int = 1, name: str = "worker-0") -> int:
        """Waits until process number `run` of the worker serves; returns its id."""
        await until(
            lambda: any((event.worker, event.run) == (name, run) for event in self.told(What.READY)),
            f"process {run} of {name} is ready, in {self.state_file}",
        )
        view = self.view(name)
        assert view.run == run
        assert view.pid is not None
        return view.pid

    async def running(self, name: str = "worker-0") -> int:
        """Waits until the worker has a process; returns its id."""
        return int(await until(lambda: self.view(name).pid, f"{name} runs"))


@asynccontextmanager
async def controlled(
    folder: Path, *specs: WorkerSpec, ladder: tuple[Rung, ...] = LADDER, **policy: float
) -> AsyncIterator[Controlled]:
    """The controller in this process; at the end no worker is left."""
    state_file = folder / "controller.json"
    before = load_state(state_file)
    driver = LocalDriver(specs, before.history if before else {})
    metrics = ControllerMetrics(CollectorRegistry())
    rules = Policy(ladder, **policy)  # type: ignore[arg-type]
    controller = Controller(driver, rules, FileMemory(state_file), metrics)
    stop, hurry = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(controller.run(0.05, stop))
    try:
        yield Controlled(state_file)
    finally:
        stop.set()
        driver.wake()
        await running
        hurry.set()
        await driver.stop(5, hurry)
        assert not [view for view in driver.processes().values() if view.pid is not None]


def impatient(**seconds: float) -> tuple[Rung, ...]:
    """The usual ladder with other seconds for rungs that replace, by their troubles."""
    return tuple(
        replace(rung, seconds=seconds.get(rung.when, rung.seconds)) if rung.step is Step.REPLACE else rung
        for rung in LADDER
    )


def giving_up(deaths: int) -> tuple[Rung, ...]:
    return tuple(
        replace(rung, times=deaths) if (rung.when, rung.step) == (Trouble.DEATHS, Step.GIVE_UP) else rung
        for rung in LADDER
    )


@dataclass(frozen=True)
class ControllerProcess(Controlled):
    process: asyncio.subprocess.Process
    log: Path

    async def ended(self) -> int:
        """Waits for its end; returns its exit status."""
        return await asyncio.wait_for(self.process.wait(), PATIENCE)

    async def logged(self, words: str) -> None:
        await until(lambda: words in self.log.read_text(), f"{words!r} in {self.log}")


@asynccontextmanager
async def controller_process(
    folder: Path, *specs: WorkerSpec, **flags: object
) -> AsyncIterator[ControllerProcess]:
    """`moebius-controller` as `moebius up` starts it, in a state directory that may have known others."""
    write_stack(folder / "stack.json", StackSpec(specs))
    log = folder / "controller.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moebius_controller", "--stack", folder / "stack.json"),
            *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items()),
            stdout=output,
            stderr=output,
        )
    try:
        yield ControllerProcess(folder / "controller.json", process, log)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def gone(*pids: int) -> None:
    """Waits until none of the processes is there."""
    await until(lambda: not any(map(_lives, pids)), f"the processes {pids} are gone")


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
