"""Keeps an engine alive: starts it, attends to it, buries it, starts the next."""

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.checkpoint.checkpoint import CheckpointError
from moebius_worker.flight_recorder import suspect
from moebius_worker.framing import FrameError
from moebius_worker.front.engine_process import EngineProcess
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.level_file import read_level
from moebius_worker.front.served_model import read_served_model
from moebius_worker.front.standby import Standby
from moebius_worker.front.state import WorkerState
from moebius_worker.front.supervise import End, Observation, Policy, deaths_in_a_row, judge, restart_delay
from moebius_worker.settings import WorkerSettings

# Seconds between two looks at an engine that says nothing.
LOOK_SECONDS = 0.25
# Seconds for which an engine is on probation after one that a kernel may have killed. What killed it is there
# again within seconds: requests move.
PROBATION_SECONDS = 60.0
# Seconds between a dead engine's end of file and its exit status, at most.
LAST_WORDS_SECONDS = 1.0

log = structlog.get_logger(__name__)


@dataclass
class _Life:
    """One engine process, from its start until it is given up."""

    engine: EngineProcess
    settings: WorkerSettings
    # On the clock of time.monotonic().
    ready_since: float | None = None
    broken: str | None = None
    fatal: engine_pb2.EngineFatal | None = None

    @property
    def on_probation(self) -> bool:
        """Whether it waits for each of its operations."""
        ready_for = 0.0 if self.ready_since is None else time.monotonic() - self.ready_since
        return ready_for < self.settings.probation


class Supervisor:
    """`changed` is awaited whenever the worker's state has changed."""

    def __init__(
        self,
        settings: WorkerSettings,
        state: WorkerState,
        exchange: Exchange,
        changed: Callable[[], Awaitable[None]],
        standby: Standby,
    ) -> None:
        # Backends that engines died of are excluded in it.
        self._settings = settings
        # The last engine may have died of a kernel, and nobody knows of which.
        self._searching = False
        self._standby = standby
        self._policy = Policy(
            stall_timeout=settings.stall_timeout,
            load_stall_timeout=settings.load_stall_timeout,
            restart_delay=settings.restart_delay,
            max_restart_delay=settings.max_restart_delay,
            healthy_after=settings.healthy_after,
        )
        self._state = state
        self._exchange = exchange
        self._changed = changed
        state.fallback_levels = len(settings.fallback_levels)

    async def run(self) -> None:
        """Returns when no engine can be started, on any level; cancelled, it kills the one that runs."""
        deaths = 0
        while True:
            settings = self._on_wanted_level()
            end, ready_for = await self._start_and_attend(settings)
            if end is None:
                deaths = 0
                continue
            if end.permanent:
                log.error("the engine cannot be started; not trying again", message=end.message)
                if self._settings.level_file is None:
                    return
                delay = math.inf
            else:
                deaths = deaths_in_a_row(deaths, ready_for, self._policy)
                delay = restart_delay(deaths, self._policy, random.random())
                seconds = round(delay, 2)
                log.error("engine ended", message=end.message, deaths=deaths, restart_in_seconds=seconds)
            if await self._pause(delay):
                deaths = 0

    def _wanted_level(self) -> int:
        """As far as there are levels; the one of before if the file does not tell."""
        path = self._settings.level_file
        level = 0 if path is None else read_level(path)
        if level is None:
            return self._state.fallback_level
        return min(level, len(self._settings.fallback_levels))

    def _on_wanted_level(self) -> WorkerSettings:
        level = self._state.fallback_level = self._wanted_level()
        self._state.fallback_name = self._settings.fallback_levels[level - 1].name if level else ""
        if level:
            log.warning("the engine starts on a fallback level", level=level, name=self._state.fallback_name)
        settings = self._settings.at_level(level)
        if not self._searching:
            return settings
        log.warning("the engine starts on probation: it is slow, and a fault shows where it happens")
        return settings.model_copy(update={"probation": max(settings.probation, PROBATION_SECONDS)})

    async def _pause(self, seconds: float) -> bool:
        """Returns True, and early, when another level is asked for."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._wanted_level() != self._state.fallback_level:
                return True
            await asyncio.sleep(min(left, LOOK_SECONDS))
        return False

    async def _start_and_attend(self, settings: WorkerSettings) -> tuple[End | None, float | None]:
        """One engine's life: why it ended, and the seconds that it was ready, if it ever was. None: another
        level was asked for before it was ready."""
        try:
            life = _Life(await self._standby.start(settings), settings)
        except OSError as error:
            failed = End(worker_pb2.REASON_ENGINE_DEAD, f"no process can be started: {error}")
            await self._bury(failed)
            return failed, None
        try:
            log.info("engine started", engine_pid=life.engine.pid)
            self._state.engine_started(life.engine.pid)
            await self._changed()
            end = await self._attend(life)
            ready_for = None if life.ready_since is None else time.monotonic() - life.ready_since
            if end is not None:
                self._searching = end.kernel_suspected and not self._found_kernel(life)
            # Before its process is gone, which may take a while.
            await self._bury(end)
        finally:
            life.engine.kill()
            # Only then is its memory free for the next one.
            await life.engine.wait()
        return end, ready_for

    def _found_kernel(self, life: _Life) -> bool:
        """Whether there is nothing more to find out; the next engine starts without the backend of which this
        one died. If it was not on probation, nobody knows of which."""
        flights = life.engine.last_flights()
        if not life.on_probation:
            # What runs on references alone notes nothing.
            return not flights
        flight = suspect(flights)
        if flight is None:
            log.error(
                "the engine died of nothing that can be excluded", last=[str(one) for one in flights[:1]]
            )
            return True
        log.error("a backend is suspected and excluded", backend=flight.name, last=str(flight))
        excluded = (*self._settings.exclude_backends, flight.name)
        self._settings = self._settings.model_copy(
            update={"exclude_backends": tuple(dict.fromkeys(excluded))}
        )
        return True

    async def _bury(self, end: End | None) -> None:
        if end is None:
            self._state.engine_replaced()
        else:
            self._state.engine_ended(end.reason, end.message, permanent=end.permanent)
            self._exchange.disconnect(end)
        await self._changed()

    async def _attend(self, life: _Life) -> End | None:
        """Returns when the engine must be given up; None: for one on another level."""
        reader = asyncio.create_task(self._read(life))
        exit_status = asyncio.create_task(life.engine.wait())
        try:
            while True:
                before = time.monotonic()
                await asyncio.wait(
                    {reader, exit_status}, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                # If this process itself was stopped, the time is not the engine's to answer for.
                self._state.silence += min(time.monotonic() - before, 2 * LOOK_SECONDS)
                if reader.done() or exit_status.done():
                    await asyncio.wait({reader, exit_status}, timeout=LAST_WORDS_SECONDS)
                if reader.done():
                    reader.result()
                seen = Observation(
                    ready=life.ready_since is not None,
                    silence=self._state.silence,
                    exit_code=exit_status.result() if exit_status.done() else None,
                    broken=life.broken,
                    fatal=life.fatal,
                )
                end = judge(seen, self._policy)
                if end is not None:
                    return end
                if not seen.ready and self._wanted_level() != self._state.fallback_level:
                    log.warning("another fallback level is asked for before the engine is ready")
                    return None
        finally:
            reader.cancel()
            exit_status.cancel()
            await asyncio.wait({reader, exit_status})

    async def _read(self, life: _Life) -> None:
        """Takes what the engine says, until it says no more."""
        try:
            async for frame in life.engine.frames():
                self._state.silence = 0.0
                await self._take(frame, life)
            life.broken = "the engine closed its connection"
        except FrameError as error:
            life.broken = str(error)
        except CheckpointError as error:
            life.fatal = engine_pb2.EngineFatal(
                reason=worker_pb2.REASON_ENGINE_DEAD, message=str(error), permanent=True
            )

    async def _take(self, frame: engine_pb2.EngineFrame, life: _Life) -> None:
        match frame.WhichOneof("frame"):
            case "begin":
                self._exchange.step_begins(frame.begin)
            case "end":
                self._state.stats = frame.end.stats
                if frame.end.HasField("experts"):
                    self._state.experts = frame.end.experts
                self._exchange.step_ended(frame.end)
            case "loading":
                self._state.load = frame.loading
            case "ready":
                await self._engine_ready(frame.ready, life)
            case "fatal":
                life.fatal = frame.fatal
            case _:
                raise FrameError("the engine sent an empty frame")

    async def _engine_ready(self, ready: engine_pb2.EngineReady, life: _Life) -> None:
        try:
            model, files = await asyncio.to_thread(read_served_model, life.settings, ready.model)
        except CheckpointError:
            raise
        except Exception as error:
            # Whatever is wrong with the files: the next engine's front would find the same.
            log.exception("the served model cannot be read")
            raise CheckpointError(
                f"The tokenizer of {life.settings.model} cannot be read: {type(error).__name__}: {error}"
            ) from error
        # What the engine said meanwhile has not been read.
        self._state.silence = 0.0
        self._state.engine_ready(model, files, ready.stats)
        settings = life.settings
        self._exchange.connect(life.engine.send, model, settings.max_running + settings.max_waiting)
        life.ready_since = time.monotonic()
        log.info("engine ready", model=model.id, engine_pid=life.engine.pid)
        await self._changed()
        await self._standby.engine_ready(settings, model.device)
