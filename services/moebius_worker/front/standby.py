"""The next engine, kept ready: a process that has imported what engines need, and waits for its settings.

It has no model and touches no GPU; what it costs is memory of the host. It dies with the front, and ends when
its stdin does.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Literal

import structlog

from moebius_worker.front.engine_process import EngineProcess, StartedProcess, start_process
from moebius_worker.host_memory import host_memory
from moebius_worker.settings import WorkerSettings

Wanted = Literal["auto", "yes", "no"]
StartEngine = Callable[[WorkerSettings], Awaitable[EngineProcess]]

# Seconds from its settings to the first word of a process that stood by; it may still have to import.
ANSWER_SECONDS = 10.0
# Several times of what it takes: nobody's memory runs out because of it.
LEFT_BYTES = 2 * 2**30

log = structlog.get_logger(__name__)


class Standby:
    """`wanted`: the setting. `start_anew` starts an engine when nobody stands by."""

    def __init__(self, wanted: Wanted, start_anew: StartEngine = EngineProcess.start) -> None:
        self._wanted = wanted
        self._start_anew = start_anew
        self._waiting: StartedProcess | None = None

    async def start(self, settings: WorkerSettings) -> EngineProcess:
        """The process that stands by becomes an engine with these settings, if it can. Raises OSError."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            try:
                if await _answers(waiting, settings):
                    log.info("the standby becomes the engine", engine_pid=waiting.process.pid)
                    return await EngineProcess.connected(waiting.process, waiting.connection, waiting.flights)
            except BaseException:
                await _end(waiting)
                raise
            log.warning("the standby does not answer; an engine is started anew", pid=waiting.process.pid)
            await _end(waiting)
        return await self._start_anew(settings)

    async def engine_ready(self, settings: WorkerSettings, device: str) -> None:
        """Now there is time for another process to get ready, if engines on `device` are worth one."""
        if self._waiting is not None and self._waiting.process.returncode is None:
            return
        await self.end()
        try:
            if worth_it(self._wanted, device, host_memory().available):
                self._waiting = await start_process(settings, "--standby", stdin=asyncio.subprocess.PIPE)
                log.info("a process gets ready to be the next engine", pid=self._waiting.process.pid)
        except OSError as error:
            log.warning("no process can stand by", error=str(error))

    async def end(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            await _end(waiting)


def worth_it(wanted: Wanted, device: str, available: int) -> bool:
    """Whether a process is to stand by for engines on `device`; `available`: bytes of the host's memory."""
    return wanted == "yes" or (wanted == "auto" and device.startswith("cuda") and available >= LEFT_BYTES)


async def _answers(waiting: StartedProcess, settings: WorkerSettings) -> bool:
    """Whether it says something once it has its settings. What it says is left to be read."""
    stdin = waiting.process.stdin
    assert stdin is not None
    stdin.write(settings.model_dump_json().encode() + b"\n")
    stdin.close()
    says = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(waiting.connection, says.set)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await says.wait()
        # Nothing at all: it has closed its end.
        return bool(waiting.connection.recv(1, socket.MSG_PEEK))
    except (TimeoutError, ConnectionResetError):
        return False
    finally:
        loop.remove_reader(waiting.connection)


async def _end(waiting: StartedProcess) -> None:
    """SIGKILL, which a stopped process cannot ignore."""
    with contextlib.suppress(ProcessLookupError):
        waiting.process.kill()
    if waiting.process.stdin is not None:
        waiting.process.stdin.close()
    waiting.connection.close()
    waiting.flights.close()
    await waiting.process.wait()
