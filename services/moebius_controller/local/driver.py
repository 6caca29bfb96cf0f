"""Workers as processes of this machine."""

import asyncio
import signal
from collections.abc import Mapping, Sequence

import structlog

from moebius_controller.local.worker import LocalWorker
from moebius_controller.spec import WorkerSpec
from moebius_controller.state_file import ProcessView
from moebius_controller.types import Action, History, Past, Replace, SetLevel, Start
from moebius_controller.view import View

log = structlog.get_logger(__name__)


class LocalDriver:
    """The driver that `Controller` runs with under `moebius up`."""

    def __init__(self, specs: Sequence[WorkerSpec], history: History) -> None:
        """`history`: of the controller before this one; its workers died with it."""
        self._changed = asyncio.Event()
        self._workers = {
            spec.name: LocalWorker(spec, history.get(spec.name, Past()), self._changed) for spec in specs
        }

    def view(self) -> View:
        return View([worker.observe() for worker in self._workers.values()])

    def processes(self) -> Mapping[str, ProcessView]:
        return {name: worker.process() for name, worker in self._workers.items()}

    async def perform(self, action: Action) -> bool:
        worker = self._workers[action.worker]
        match action:
            case Start():
                await worker.start(action.run)
            case Replace():
                # A stopped process cannot ignore it.
                worker.send(signal.SIGKILL)
            case SetLevel():
                try:
                    worker.set_level(action.level)
                except OSError as error:
                    log.warning("a fallback level cannot be set", worker=action.worker, error=str(error))
                    return False
        return True

    def wake(self) -> None:
        """Ends a `changed` that is awaited."""
        self._changed.set()

    async def changed(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return
        self._changed.clear()

    async def stop(self, grace: float, hurry: asyncio.Event) -> None:
        """Ends all workers: SIGTERM, and SIGKILL after `grace` seconds or when `hurry` is set."""
        self._send(signal.SIGTERM)
        ended = asyncio.create_task(self._ended())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({ended, hurried}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done():
            log.warning("killing the workers that have not ended")
            self._send(signal.SIGKILL)
        await ended

    def _send(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.send(number)

    async def _ended(self) -> None:
        await asyncio.gather(*(worker.ended() for worker in self._workers.values()))
