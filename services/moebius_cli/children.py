"""The two processes that `moebius up` starts itself, gateway and controller, and keeps alive."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from moebius_cli.errors import CliError
from moebius_controller.local.child import dies_with_us

_FIRST_DELAY = 0.5
_LONGEST_DELAY = 15.0
# After so many seconds of life the delays begin anew.
_HEALTHY_AFTER = 60.0


class Child:
    """A process that is started again whenever it ends, until it is stopped."""

    def __init__(self, name: str, command: Sequence[str], log: Path, on_start: Callable[[], None]) -> None:
        """`on_start` is called whenever there is a new process id."""
        self.name = name
        self.log = log
        self._command = command
        self._on_start = on_start
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        # Started again so many times.
        self.restarts = 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    async def keep(self, say: Callable[[str], None]) -> None:
        """Runs it until it is stopped. Call `start` first."""
        delay = _FIRST_DELAY
        while True:
            assert self._process is not None, "start() comes first"
            started = time.monotonic()
            code = await self._process.wait()
            if self._stopping.is_set():
                return
            say(f"{self.name} ended with status {code} and is started again (log: {self.log})")
            if time.monotonic() - started > _HEALTHY_AFTER:
                delay = _FIRST_DELAY
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
                return
            delay = min(2 * delay, _LONGEST_DELAY)
            self.restarts += 1
            await self.start()
            if self._stopping.is_set():
                # Said while the process was being made, and so to the one before it.
                await self.kill()
                return

    async def start(self) -> None:
        """In a session of its own: Ctrl-C is for us, who then stop things in order."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *dies_with_us(*self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._on_start()

    def check(self) -> None:
        """Raises CliError, with its last words, if it had to be started again."""
        ended = self._process is None or self._process.returncode is not None
        if self.restarts or ended:
            raise CliError(f"The {self.name} does not start: {last_line(self.log)}\nIts log: {self.log}")

    async def stop(self, grace: float) -> None:
        """SIGTERM, and after `grace` seconds an end at once."""
        self._stopping.set()
        if self._process is None or self._process.returncode is not None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), grace)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """Ends it and all that it started, at once; returns when they are gone."""
        self._stopping.set()
        if self._process is None or self._process.returncode is not None:
            return
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for process in family:
            # Most are gone already: they die with the process that started them.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await self._process.wait()
        await asyncio.to_thread(psutil.wait_procs, family, timeout=5)


def last_line(log: Path) -> str:
    """The last thing that a process said."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
