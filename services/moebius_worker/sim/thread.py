"""A simulated engine in a thread: what a front otherwise starts as a process."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable

from moebius_proto.worker.v1 import worker_pb2
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.convert import fatal
from moebius_worker.engine.pipe import FrontGoneError, Pipe
from moebius_worker.front.engine_process import EngineProcess
from moebius_worker.settings import WorkerSettings
from moebius_worker.sim.engine import run_simulation, stall

_KILLED = -9


class EngineThread:
    """Its life, as a front sees that of a process. `kill` closes nothing: the front closes its connection."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        return os.getpid()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.end(_KILLED)

    def end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    def end_from_thread(self, code: int) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.end, code)


class _ThreadEnds:
    def __init__(self, pipe: Pipe, reset: Callable[[], None]) -> None:
        self._pipe = pipe
        self._reset = reset

    def die(self) -> None:
        # No error of a step, which the loop would survive.
        raise SystemExit

    def stall(self) -> None:
        stall(self._pipe)

    def reset(self) -> None:
        self._reset()
        stall(self._pipe)


async def start_thread(settings: WorkerSettings, reset: Callable[[], None]) -> EngineProcess:
    """`reset` makes the worker vanish; it is called in the engine's thread."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    life = EngineThread()
    arguments = (theirs, settings, life, reset)
    threading.Thread(target=_run, args=arguments, name="engine", daemon=True).start()
    return await EngineProcess.connected(life, ours)


def _run(
    connection: socket.socket, settings: WorkerSettings, life: EngineThread, reset: Callable[[], None]
) -> None:
    code = 1
    with connection:
        pipe = Pipe(connection)
        try:
            run_simulation(pipe, settings, _ThreadEnds(pipe, reset))
        except FrontGoneError:
            code = 0
        except SystemExit:
            code = _KILLED
        except CheckpointError as error:
            pipe.send(fatal(worker_pb2.REASON_ENGINE_DEAD, str(error), permanent=True))
    life.end_from_thread(code)
