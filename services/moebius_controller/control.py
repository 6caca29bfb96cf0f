"""The control loop: look, decide, act, remember; again and again, until it is told to stop."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from moebius_controller.decide import Action, History, Observation, Policy, decide, remember
from moebius_controller.events import KEPT_EVENTS, Event, What, events_of
from moebius_controller.metrics import ControllerMetrics
from moebius_controller.state_file import ControllerState, ProcessView, save_state

log = structlog.get_logger(__name__)


class Driver(Protocol):
    """How workers are seen and acted on: processes of this machine, or pods of a cluster."""

    def observe(self) -> Sequence[Observation]:
        """How the workers are, from memory, at once."""

    def processes(self) -> Mapping[str, ProcessView]:
        """Of what the workers run in, for people."""

    async def perform(self, action: Action) -> None:
        """Carries out `action`; a failure to do so is what the next look sees. `GiveUp` is nothing to do."""

    async def changed(self, seconds: float) -> None:
        """Returns when something happened that is worth a look, or after `seconds`."""


class Controller:
    def __init__(
        self,
        driver: Driver,
        policy: Policy,
        state_path: Path,
        metrics: ControllerMetrics,
        before: ControllerState | None,
    ) -> None:
        """`before`: what the controller before this one left."""
        self._driver = driver
        self._policy = policy
        self._state_path = state_path
        self._metrics = metrics
        self._history: History = before.history if before else {}
        self._events: tuple[Event, ...] = before.events if before else ()
        self._saved: ControllerState | None = None

    async def run(self, look_interval: float, stop: asyncio.Event) -> None:
        """Looks at least every `look_interval` seconds, until `stop` is set."""
        while not stop.is_set():
            await self.look(time.time())
            await self._driver.changed(look_interval)

    async def look(self, now: float) -> None:
        """One round."""
        observations = self._driver.observe()
        actions = decide(observations, self._history, self._policy, now)
        for action in actions:
            await self._driver.perform(action)
        events = events_of(self._history, observations, actions, now)
        self._history = remember(self._history, observations, actions, self._policy, now)
        self._events = (*self._events, *events)[-KEPT_EVENTS:]
        self._metrics.looked(observations, events, now)
        for event in events:
            tell = log.info if event.what in (What.STARTED, What.READY) else log.warning
            tell(f"worker {event.what}", worker=event.worker, run=event.run, reason=event.reason)
        self.save()

    def save(self) -> None:
        """Writes the state file if there is something new to say."""
        state = ControllerState(os.getpid(), self._history, self._driver.processes(), self._events)
        if state == self._saved:
            return
        try:
            save_state(self._state_path, state)
            self._saved = state
        except OSError as error:
            # A full disk is no reason to leave the workers alone; the next look tries again.
            log.error("cannot write the state file", path=str(self._state_path), error=str(error))
