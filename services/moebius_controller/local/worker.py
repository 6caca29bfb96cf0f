"""One worker as processes of this machine, one after another, and what is known of the current one."""

import asyncio
import os
import signal
import time
from pathlib import Path

from moebius_common.child import dies_with_us
from moebius_common.exit_reason import exit_reason, last_line
from moebius_controller.decide import Health, Observation
from moebius_controller.local.probe import Probe, health_of
from moebius_controller.spec import WorkerSpec
from moebius_controller.state_file import ProcessView

PROBE_INTERVAL = 0.25
PROBE_TIMEOUT = 2.0
# A longer time between two probes means that this process did not run; no worker has to answer for that.
_LONGEST_ROUND = PROBE_TIMEOUT + 2 * PROBE_INTERVAL


class LocalWorker:
    """`changed` is set when there is news worth a look."""

    def __init__(self, spec: WorkerSpec, run: int, changed: asyncio.Event) -> None:
        """`run`: the last one that was started by an earlier controller, with which it died; 0 for none."""
        self.spec = spec
        self._changed = changed
        self._run = run
        self._death: str | None = "the controller that had started it is gone" if run else None
        self._process: asyncio.subprocess.Process | None = None
        self._attending: asyncio.Task[None] | None = None
        self._health: Health | None = None
        self._silence = 0.0

    def observe(self) -> Observation:
        return Observation(self.spec.name, self._run, self._death, self._health, self._silence)

    def process(self) -> ProcessView:
        running = self._process is not None and self._death is None
        return ProcessView(self._run, self._process.pid if running and self._process else None, self._death)

    async def start(self, run: int) -> None:
        """Starts process number `run`. If the machine refuses, that is seen as a death."""
        self._run, self._death, self._health, self._silence = run, None, None, 0.0
        try:
            self.spec.log.parent.mkdir(parents=True, exist_ok=True)
            with self.spec.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *dies_with_us(*self.spec.argv),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self.spec.env},
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
        watching = asyncio.create_task(self._watch(process.pid))
        try:
            code = await process.wait()
        finally:
            watching.cancel()
            await asyncio.wait({watching})
        self._death, self._health = _epitaph(code, self.spec.log), None
        self._changed.set()

    async def _watch(self, pid: int) -> None:
        """Asks the process how it is, again and again."""
        probe = Probe(self.spec.listen)
        before = time.monotonic()
        try:
            while True:
                status = await probe.status(PROBE_TIMEOUT)
                now = time.monotonic()
                # Whoever else answers at this address is not our worker.
                if status is not None and status.pid == pid:
                    self._health, self._silence = health_of(status), 0.0
                else:
                    self._silence += min(now - before, _LONGEST_ROUND)
                before = now
                await asyncio.sleep(PROBE_INTERVAL)
        finally:
            await probe.close()


def _epitaph(code: int, log: Path) -> str:
    """With its last words, unless a signal left it no time for any."""
    last_words = last_line(log) if code >= 0 else ""
    return f"it {exit_reason(code)}" + (f": {last_words}" if last_words else "")
