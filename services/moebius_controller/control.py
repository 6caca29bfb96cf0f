"""The control loop: look, decide, act, remember; again and again, until it is told to stop."""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Protocol

import structlog

from moebius_controller.decide import decide
from moebius_controller.events import KEPT_EVENTS, Event, What, events_of
from moebius_controller.history import remember
from moebius_controller.metrics import ControllerMetrics
from moebius_controller.policy import Policy
from moebius_controller.state_file import (
    ControllerState,
    Memory,
    ProcessView,
    StaleMemoryError,
    StateFileError,
)
from moebius_controller.types import Action, History
from moebius_controller.view import View

log = structlog.get_logger(__name__)

# Whatever is waited for takes less until it is given up, in seconds.
LONGEST_PAUSE = 60.0


class Driver(Protocol):
    """How workers are seen and acted on: processes of this machine, or pods of a cluster."""

    def view(self) -> View:
        """How the workers are, from memory, at once."""

    def processes(self) -> Mapping[str, ProcessView]:
        """Of what the workers run in, for people."""

    async def perform(self, action: Action) -> bool:
        """Whether `action` was carried out; if not, it is decided anew at the next look. It is logged why."""

    async def changed(self, seconds: float) -> None:
        """Returns when something happened that is worth a look, or after `seconds`."""


class Controller:
    def __init__(self, driver: Driver, policy: Policy, memory: Memory, metrics: ControllerMetrics) -> None:
        self._driver = driver
        self._policy = policy
        self._memory = memory
        self._metrics = metrics
        self._history: History = {}
        self._events: tuple[Event, ...] = ()
        self._term: int | None = None
        self._saved: ControllerState | None = None
        self._saved_at = 0.0
        self._turned_at = time.monotonic()

    def alive(self) -> bool:
        """Whether the loop turns; any thread may ask."""
        return time.monotonic() - self._turned_at < LONGEST_PAUSE

    async def run(self, look_interval: float, stop: asyncio.Event) -> None:
        """Looks at least every `look_interval` seconds, until `stop` is set."""
        while not stop.is_set():
            await self.look(time.time())
            self._turned_at = time.monotonic()
            await self._driver.changed(look_interval)

    async def look(self, now: float) -> None:
        """One round."""
        view = self._driver.view()
        if view.hands_off or not await self._remembers(view.term):
            # What was done is another one's to know by now.
            self._metrics.looked(view, {}, [], [], now)
            return
        decided = decide(view.observations, self._history, self._policy, now, view.marked_nodes)
        done = await asyncio.gather(*map(self._perform, decided))
        actions = [action for action, carried_out in zip(decided, done, strict=True) if carried_out]
        events = events_of(self._history, view.observations, actions, now)
        self._history = remember(self._history, view.observations, actions, self._policy, now)
        self._events = (*self._events, *events)[-KEPT_EVENTS:]
        self._metrics.looked(view, self._history, events, actions, now)
        for event in events:
            tell = log.info if event.what in (What.STARTED, What.READY) else log.warning
            tell(f"worker {event.what}", worker=event.worker, run=event.run, reason=event.reason)
        if events or not 0 <= now - self._saved_at < self._memory.interval:
            await self.save(now)

    async def save(self, now: float) -> None:
        """Writes the state if there is something new to say, and was read before."""
        if self._term is None:
            return
        state = ControllerState(os.getpid(), self._history, self._driver.processes(), self._events)
        if state == self._saved:
            return
        try:
            await self._memory.save(state)
            self._saved, self._saved_at = state, now
        except StaleMemoryError:
            log.warning("somebody else has written the controller's state; reading it again")
            self._term = None
        except OSError as error:
            # A full disk is no reason to leave the workers alone; the next look tries again.
            log.error("cannot write the controller's state", error=str(error))

    async def _perform(self, action: Action) -> bool:
        done = await self._driver.perform(action)
        # Many actions over a slow API take long, all in all.
        self._turned_at = time.monotonic()
        return done

    async def _remembers(self, term: int) -> bool:
        """Whether what was done before is known; it is read when this controller begins to lead."""
        if term == self._term:
            return True
        try:
            before = await self._memory.load()
        except StateFileError as error:
            log.warning("starting without a history", error=str(error))
            before = None
        except OSError as error:
            log.error("cannot read the controller's state; nothing is done yet", error=str(error))
            return False
        self._history = before.history if before else {}
        self._events = before.events if before else ()
        self._term, self._saved = term, None
        return True
