"""Keeps requests back until their time to first token has passed."""

import heapq
import itertools
import time

from moebius_proto.worker.v1 import engine_pb2
from moebius_worker.engine.pipe import Pipe
from moebius_worker.sim.model import varied
from moebius_worker.sim.settings import SimSettings


class Arrivals:
    """Submits wait; a cancel of one that waits goes with it, any other passes at once."""

    def __init__(self) -> None:
        self._held: dict[int, engine_pb2.FrontFrame] = {}
        # (when it is due, order, handle); of those that were cancelled too.
        self._due: list[tuple[float, int, int]] = []
        self._order = itertools.count()

    def hold(self, frame: engine_pb2.FrontFrame, due: float) -> None:
        handle = frame.submit.handle
        self._held[handle] = frame
        heapq.heappush(self._due, (due, next(self._order), handle))

    def cancel(self, handle: int) -> bool:
        """False if it is not held."""
        return self._held.pop(handle, None) is not None

    def release(self, now: float) -> list[engine_pb2.FrontFrame]:
        """What is due, in the order in which it became so."""
        frames: list[engine_pb2.FrontFrame] = []
        while self._due and self._due[0][0] <= now:
            frame = self._held.pop(heapq.heappop(self._due)[2], None)
            if frame is not None:
                frames.append(frame)
        return frames

    def pause(self, now: float) -> float | None:
        """Seconds until the next one is due; None if none is held."""
        return max(0.0, self._due[0][0] - now) if self._due else None


class DelayedPipe:
    """A Pipe for the engine's loop."""

    def __init__(self, pipe: Pipe, settings: SimSettings) -> None:
        self._pipe = pipe
        self._settings = settings
        self._arrivals = Arrivals()

    def send(self, frame: engine_pb2.EngineFrame) -> None:
        self._pipe.send(frame)

    def receive(self, timeout: float) -> list[engine_pb2.FrontFrame]:
        """As the pipe's, for what is due."""
        pause = self._arrivals.pause(time.monotonic())
        came = self._pipe.receive(timeout if pause is None else min(timeout, pause))
        now = time.monotonic()
        passed: list[engine_pb2.FrontFrame] = []
        for frame in came:
            if frame.WhichOneof("frame") == "submit":
                self._arrivals.hold(frame, now + varied(self._settings.ttft, self._settings.jitter))
            elif not self._arrivals.cancel(frame.cancel.handle):
                passed.append(frame)
        return [*passed, *self._arrivals.release(now)]
