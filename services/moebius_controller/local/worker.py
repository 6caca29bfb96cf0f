"""One worker as processes of this machine, one after another, and what is known of the current one."""

import asyncio
import os
import signal
import zlib
from dataclasses import asdict
from pathlib import Path

from moebius_common.child import dies_with_us, end_of
from moebius_common.exit_reason import exit_reason, last_line
from moebius_controller.probe import Probe, Pulse, Rhythm
from moebius_controller.spec import WorkerSpec
from moebius_controller.state_file import ProcessView
from moebius_controller.types import Observation, Past

RHYTHM = Rhythm(interval=0.25, timeout=2.0)
LEVEL_FILE = "MOEBIUS_WORKER_LEVEL_FILE"
# As the annotations of a pod look in a file.
_LEVEL = 'moebius.dev/fallback-level="{}"\n'


class LocalWorker:
    """`changed` is set when there is news worth a look."""

    def __init__(self, spec: WorkerSpec, past: Past, changed: asyncio.Event) -> None:
        """`past`: as an earlier controller knew it, with which its last process died."""
        self.spec = spec
        self._changed = changed
        self._run = past.started
        self._death: str | None = "the controller that had started it is gone" if past.started else None
        self._blameless = True
        self._process: asyncio.subprocess.Process | None = None
        self._attending: asyncio.Task[None] | None = None
        self._pulse: Pulse | None = None
        self._level = past.level
        self._level_file = spec.log.with_suffix(".level")
        self._revision = f"{zlib.crc32(repr(asdict(spec)).encode()):08x}"

    def observe(self) -> Observation:
        pulse = self._pulse
        return Observation(
            self.spec.name,
            self._run,
            self._death,
            pulse.health if pulse else None,
            pulse.silence if pulse else 0.0,
            blameless=self._blameless,
            level=self._level,
            revision=self._revision,
        )

    def process(self) -> ProcessView:
        running = self._process is not None and self._death is None
        return ProcessView(self._run, self._process.pid if running and self._process else None, self._death)

    def set_level(self, level: int) -> None:
        """For the process that runs, when it starts an engine, and for those after it. Raises OSError."""
        # A disk that is full keeps no worker down whose level is as it was.
        if self._written_level() != (content := _LEVEL.format(level)):
            new = self._level_file.with_suffix(".level.new")
            new.write_text(content, encoding="utf-8")
            new.replace(self._level_file)
        self._level = level

    def _written_level(self) -> str:
        try:
            return self._level_file.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return _LEVEL.format(0)

    async def start(self, run: int) -> None:
        """Starts process number `run`. If the machine refuses, that is seen as a death."""
        self._run, self._death, self._pulse, self._blameless = run, None, None, False
        try:
            self.set_level(self._level)
            with end_of(self.spec.log) as log:
                self._process = await asyncio.create_subprocess_exec(
                    *dies_with_us(*self.spec.argv),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.spec.env, LEVEL_FILE: str(self._level_file)},
                )
        except OSError as error:
            self._process, self._death = None, f"it could not be started: {error}"
            return
        self._attending = asyncio.create_task(self._attend(self._process))

    def send(self, number: signal.Signals) -> None:
        """Harmless when the process is gone."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def ended(self) -> None:
        """Returns when the process, if there was one, is gone."""
        if self._attending is not None:
            await self._attending

    async def _attend(self, process: asyncio.subprocess.Process) -> None:
        """Until the process ends; then says how."""
        # Whoever else answers at this address is not our worker.
        self._pulse = Pulse(Probe(self.spec.listen), RHYTHM, lambda status: status.pid == process.pid)
        feeling = asyncio.create_task(self._pulse.feel())
        try:
            code = await process.wait()
        finally:
            feeling.cancel()
            await asyncio.wait({feeling})
        self._death, self._pulse = _epitaph(code, self.spec.log), None
        # Nothing but a signal that asks for it ends a worker in good order.
        self._blameless = code == 0
        self._changed.set()


def _epitaph(code: int, log: Path) -> str:
    """With its last words, unless a signal left it no time for any."""
    last_words = last_line(log) if code >= 0 else ""
    return f"it {exit_reason(code)}" + (f": {last_words}" if last_words else "")
