"""The two processes that `moebius up` starts itself, gateway and controller, and keeps alive."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from moebius_cli.errors import CliError
from moebius_common.backoff import backoff
from moebius_common.child import dies_with_us, end_of
from moebius_common.exit_reason import exit_reason, last_line

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
        # Ends, and starts that the machine refused, in a row.
        failures = 0
        while True:
            assert self._process is not None, "start() comes first"
            started = time.monotonic()
            status = await self._process.wait()
            if self._stopping.is_set():
                return
            say(f"{self.name} {exit_reason(status)} and is started again (log: {self.log})")
            if time.monotonic() - started > _HEALTHY_AFTER:
                failures = 0
            restarted = False
            while not restarted:
                with suppress(TimeoutError):
                    await asyncio.wait_for(
                        self._stopping.wait(), backoff(_FIRST_DELAY, failures, _LONGEST_DELAY)
                    )
                    return
                failures += 1
                self.restarts += 1
                try:
                    await self.start()
                    restarted = True
                except OSError as error:
                    say(f"{self.name} cannot be started, which is tried again: {error}")
            if self._stopping.is_set():
                # Said while the process was being made, and so to the one before it.
                await self.kill()
                return

    async def start(self) -> None:
        """In a session of its own: Ctrl-C is for us, who then stop things in order.

        Raises OSError if the machine does not allow it.
        """
        with end_of(self.log) as log:
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
            last_words = last_line(self.log) or "it said nothing"
            raise CliError(f"The {self.name} does not start: {last_words}\nIts log: {self.log}")

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
        family: list[psutil.Process] = []
        # Whatever is gone already has what it wanted: most die with the process that started them.
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await self._process.wait()
        await asyncio.to_thread(psutil.wait_procs, family, timeout=5)
