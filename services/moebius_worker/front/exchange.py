"""The requests in the engine and the gateways that wait for them. No I/O: frames in, frames out."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import structlog

from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.front.state import WorkerState
from moebius_worker.front.stream import GatewayStream
from moebius_worker.front.supervise import End
from moebius_worker.front.validate import defect
from moebius_worker.metrics import FinishedRequest, RequestMetrics

# How long a gateway had better wait before it tries this worker again, for refusals of which nobody
# knows how long they last.
RETRY_AFTER_MS = 1000

log = structlog.get_logger(__name__)


# What goes to each gateway.
_Frames = defaultdict[GatewayStream, worker_pb2.WorkerFrame]


@dataclass(slots=True)
class _Route:
    """A request in the engine: whose it is, and what it got so far. Times of time.monotonic()."""

    stream: GatewayStream
    handle: int
    request_id: str
    # Generated tokens, those resumed included.
    tokens_sent: int
    submitted: float
    prompt_tokens: int
    resumed: int
    # When a step first computed it.
    begun: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(frozen=True, slots=True)
class _Link:
    """An engine that is ready."""

    send: Callable[[engine_pb2.FrontFrame], None]
    model: worker_pb2.Model
    # Requests that it can run and let wait.
    capacity: int


@dataclass
class Exchange:
    """Renames the handles of gateways to those of the engine and back, and splits steps by gateway."""

    state: WorkerState
    metrics: RequestMetrics
    _link: _Link | None = None
    _streams: set[GatewayStream] = field(default_factory=set)
    # By the engine's handle.
    _routes: dict[int, _Route] = field(default_factory=dict)
    # Never starts anew, so that nothing of a dead engine is taken for something of its successor.
    _handles: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    # What the engine is computing, by its own word.
    _in_step: frozenset[int] = frozenset()
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    # ---- gateways -----------------------------------------------------------------------------------

    @contextmanager
    def attached(self) -> Iterator[GatewayStream]:
        """A stream to a gateway. At its end the requests that came on it are cancelled."""
        stream = GatewayStream()
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)
            for handle in list(stream.handles):
                self.cancel(stream, handle)

    def broadcast(self, status: worker_pb2.Status) -> None:
        for stream in self._streams:
            stream.put(worker_pb2.WorkerFrame(status=status))

    def submit(self, stream: GatewayStream, submit: worker_pb2.Submit) -> None:
        """Sends the request to the engine, or answers with a failure."""
        refusal = self._refusal(stream, submit)
        if refusal is not None:
            # If the handle was in use: two requests of one name cannot be told apart, so neither goes on.
            self.cancel(stream, submit.handle)
            refusal.tokens_sent = submit.resumed
            log.info("refused", request_id=submit.request_id, message=refusal.message)
            self.metrics.failed(refusal.reason)
            failure = worker_pb2.Failure(handle=submit.handle, error=refusal)
            stream.put(worker_pb2.WorkerFrame(failures=[failure]))
            return
        assert self._link is not None
        handle = next(self._handles)
        self._routes[handle] = _Route(
            *(stream, submit.handle, submit.request_id, submit.resumed),
            submitted=time.monotonic(),
            prompt_tokens=len(submit.token_ids) - submit.resumed,
            resumed=submit.resumed,
        )
        stream.handles[submit.handle] = handle
        self._idle.clear()
        submit.handle = handle
        self._link.send(engine_pb2.FrontFrame(submit=submit))

    def cancel(self, stream: GatewayStream, handle: int) -> None:
        """Ends a request without an answer. One that is unknown has ended meanwhile."""
        engine_handle = stream.handles.get(handle)
        if engine_handle is None:
            return
        self._forget(engine_handle)
        if self._link is not None:
            self._link.send(engine_pb2.FrontFrame(cancel=worker_pb2.Cancel(handle=engine_handle)))

    async def idle(self) -> None:
        """Returns when no request is in the engine."""
        await self._idle.wait()

    @property
    def in_flight(self) -> int:
        return len(self._routes)

    @property
    def gateways(self) -> int:
        return len(self._streams)

    # ---- the engine ---------------------------------------------------------------------------------

    def connect(
        self, send: Callable[[engine_pb2.FrontFrame], None], model: worker_pb2.Model, capacity: int
    ) -> None:
        self._link = _Link(send, model, capacity)
        self.metrics.serves(model.id)

    def disconnect(self, end: End) -> None:
        """The engine is dead, or as good as dead: its requests fail at once, with the status that it left."""
        self._link = None
        frames = _new_frames()
        for handle in list(self._routes):
            accused = handle in self._in_step
            error = worker_pb2.Error(reason=end.reason, message=end.message, retryable=True, in_step=accused)
            self._fail(handle, error, frames)
        self._in_step = frozenset()
        status = self.state.status()
        for frame in frames.values():
            # In the same frame, so that no gateway tries this worker again before it knows.
            frame.status.CopyFrom(status)
        _put(frames)

    def give_up(self, message: str) -> None:
        """The worker is about to end: what still runs had better go on elsewhere."""
        frames = _new_frames()
        for handle in list(self._routes):
            self._fail(handle, _later(worker_pb2.REASON_DRAINING, message), frames)
        _put(frames)

    def step_begins(self, begin: engine_pb2.StepBegin) -> None:
        now = time.monotonic()
        self._in_step = frozenset(begin.handles)
        for handle in begin.handles:
            route = self._routes.get(handle)
            if route is not None and route.begun is None:
                route.begun = now

    def step_ended(self, end: engine_pb2.StepEnd) -> None:
        """Hands what the step brought to the gateways: a frame for each that has a part in it."""
        now = time.monotonic()
        if end.HasField("step"):
            self.metrics.step(end.step)
        frames = _new_frames()
        # Those that are not here were cancelled while the step was under way.
        for delta in end.deltas:
            if delta.handle in self._routes:
                self._deliver(delta, frames, now)
        for failure in end.failures:
            if failure.handle in self._routes:
                self._fail(failure.handle, failure.error, frames)
        _put(frames)

    # ---- inside -------------------------------------------------------------------------------------

    def _refusal(self, stream: GatewayStream, submit: worker_pb2.Submit) -> worker_pb2.Error | None:
        if submit.handle in stream.handles:
            message = f"handle {submit.handle} is in use on this stream; take another for each request"
            return worker_pb2.Error(reason=worker_pb2.REASON_BAD_REQUEST, message=message)
        if self.state.draining:
            return _later(worker_pb2.REASON_DRAINING, "this worker is about to end; use another")
        if self._link is None:
            return _later(worker_pb2.REASON_NOT_READY, "the engine is not ready; the status tells more")
        wrong = defect(submit, self._link.model)
        if wrong is not None:
            return worker_pb2.Error(reason=worker_pb2.REASON_BAD_REQUEST, message=wrong)
        if len(self._routes) >= self._link.capacity:
            return _later(worker_pb2.REASON_OVERLOADED, f"{len(self._routes)} requests are here already")
        return None

    def _deliver(self, delta: worker_pb2.Delta, frames: _Frames, now: float) -> None:
        assert self._link is not None
        model, engine_handle = self._link.model.id, delta.handle
        route = self._routes[engine_handle]
        route.tokens_sent += len(delta.token_ids)
        since = route.submitted if route.last_token is None else route.last_token
        self.metrics.tokens(model, now - since, first=route.last_token is None)
        route.last_token = now
        if route.first_token is None:
            route.first_token = now
        delta.handle = route.handle
        frames[route.stream].deltas.append(delta)
        if delta.finish_reason:
            self.metrics.finished(model, _finished(route, now), delta.finish_reason)
            self._forget(engine_handle)

    def _fail(self, engine_handle: int, error: worker_pb2.Error, frames: _Frames) -> None:
        route = self._routes[engine_handle]
        error.tokens_sent = route.tokens_sent
        log.warning(
            "request failed", request_id=route.request_id, message=error.message, in_step=error.in_step
        )
        self.metrics.failed(error.reason)
        frames[route.stream].failures.add(handle=route.handle, error=error)
        self._forget(engine_handle)

    def _forget(self, engine_handle: int) -> None:
        route = self._routes.pop(engine_handle)
        del route.stream.handles[route.handle]
        if not self._routes:
            self._idle.set()


def _finished(route: _Route, now: float) -> FinishedRequest:
    begun = route.submitted if route.begun is None else route.begun
    first = now if route.first_token is None else route.first_token
    return FinishedRequest(
        prompt_tokens=route.prompt_tokens,
        generated_tokens=route.tokens_sent - route.resumed,
        queued=begun - route.submitted,
        prefill=first - begun,
        decode=now - first,
    )


def _later(reason: worker_pb2.Reason, message: str) -> worker_pb2.Error:
    return worker_pb2.Error(reason=reason, message=message, retryable=True, retry_after_ms=RETRY_AFTER_MS)


def _new_frames() -> _Frames:
    return defaultdict(worker_pb2.WorkerFrame)


def _put(frames: _Frames) -> None:
    for stream, frame in frames.items():
        stream.put(frame)
