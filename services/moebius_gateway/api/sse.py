"""Server-sent events: a response that starts with its first event, and says so when it has nothing to say."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moebius_gateway import chunk_writer
from moebius_gateway.api.context import KEY, RequestContext
from moebius_gateway.api.errors import SERVER_ERROR, ApiError, of_generation
from moebius_gateway.api.interruption import ClientGoneError, unless_interrupted
from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.chunk_writer import ChunkWriter
from moebius_gateway.metrics import GatewayMetrics
from moebius_gateway.types import GenerationError

logger = structlog.get_logger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# Seconds in which a client must make room for the error that ends its stream.
LAST_WORD_SECONDS = 1.0
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Asks nginx not to collect events.
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """An event whose name is the `type` of its data."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


class EventSender:
    """Writes events to a client. The headers go with the first, so that until then the status is open."""

    def __init__(self, send: Send, chunks: ChunkWriter | None) -> None:
        """`chunks`: the short way, if the server has one."""
        self._send = send
        self._chunks = chunks
        self._lock = asyncio.Lock()
        self._last = time.monotonic()
        self.started = False
        self._ended = False

    async def send(self, data: bytes, *, more: bool = True) -> None:
        self._last = time.monotonic()
        # Never past what waits for room on its way through ASGI: that may be the end.
        if more and self._chunks is not None and not self._lock.locked() and self._chunks.write(data):
            return
        async with self._lock:
            if self._ended:  # a keep-alive that came too late
                return
            self._ended = not more
            if self._chunks is not None:
                self._chunks.flush()
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def keep_alive(self, interval: float) -> None:
        """For ever: sends a comment after each `interval` seconds of silence."""
        while True:
            silence = time.monotonic() - self._last
            if silence >= interval:
                await self.send(KEEP_ALIVE)
                silence = 0.0
            await asyncio.sleep(interval - silence)


class EventStream(Response):
    """Sends what `produce` sends. Its error is an HTTP error before the first event, else the last event."""

    def __init__(
        self,
        produce: Callable[[EventSender], Coroutine[Any, Any, None]],
        error_event: Callable[[ApiError], bytes],
        lifecycle: Lifecycle,
        metrics: GatewayMetrics,
        keep_alive_interval: float,
        deadline: float,
    ) -> None:
        """`deadline` is on the clock of time.monotonic()."""
        super().__init__()
        self._produce = produce
        self._error_event = error_event
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._interval = keep_alive_interval
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = EventSender(send, scope.get(chunk_writer.KEY))
        keep_alive = asyncio.create_task(sender.keep_alive(self._interval))
        try:
            await unless_interrupted(self._produce(sender), receive, self._lifecycle, self._deadline)
        except ClientGoneError:
            raise
        except Exception as error:
            if not sender.started:
                raise
            await self._fail(sender, error, scope[KEY])
        finally:
            keep_alive.cancel()

    async def _fail(self, sender: EventSender, error: Exception, context: RequestContext) -> None:
        match error:
            case GenerationError():
                answer = of_generation(error)
            case ApiError():
                answer = error
            case _:
                logger.error("a stream failed", exc_info=error)
                answer = ApiError(500, "internal error", SERVER_ERROR, code="internal_error")
        context.error = answer.code
        self._metrics.stream_errors.labels(answer.code).inc()
        # To a client that does not read it cannot be said. Its response stays incomplete: for that the server
        # closes the connection.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_SECONDS):
                await sender.send(self._error_event(answer), more=False)
