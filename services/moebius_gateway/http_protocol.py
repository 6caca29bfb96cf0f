"""Uvicorn's HTTP protocol with an end to what comes before the body: httptools itself takes any amount."""

import asyncio
import contextlib
import re
import socket
import struct
import sys
import termios
from fcntl import ioctl
from http import HTTPStatus
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from moebius_gateway import chunk_writer
from moebius_gateway.api.errors import ApiError
from moebius_gateway.chunk_writer import ChunkBatch, ChunkWriter

# Seconds in which a request's headers must have come, from its first byte on.
HEAD_SECONDS = 30.0
# A connection that is to be closed waits for what was written on it to be read. When nothing more of it was
# taken between two looks, so many seconds apart, it waits no longer.
UNREAD_SECONDS = 60.0

# Nothing but HTTP/1 is spoken here, and who wishes for another protocol may be answered in this one. The
# parser, told of such a wish, would take a request's body for what that protocol says.
UPGRADE = re.compile(rb"\r\nupgrade(?=:)", re.IGNORECASE)
# Bytes of it that may have come before.
BEFORE = len(b"\r\nupgrade")


class BoundedProtocol(HttpToolsProtocol):
    """Limits and chunks are those of a subclass; see `bounded`."""

    max_bytes: int
    max_headers: int
    chunks: ChunkBatch

    # Bytes that came for the head of a request; None outside of one. What came together with its first byte,
    # which may be requests before it, is not counted.
    _head: int | None = None
    _timer: asyncio.TimerHandle | None = None

    # The last bytes that have come, `BEFORE` of them at most.
    _last = b""

    _looking: asyncio.TimerHandle | None = None
    # Bytes that were written and not taken, at the last look; 0 if the connection was not to be closed then.
    _unread = 0

    # The request whose answer is on its way; `cycle` is the last that has come.
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # One on which nothing ever comes would take up its place for ever.
        self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)
        self._looking = self.loop.call_later(UNREAD_SECONDS, self._look)

    def data_received(self, data: bytes) -> None:
        idle = self.timeout_keep_alive_task is not None
        if self._head is not None:
            self._head += len(data)
        seen, fed = self._last + data, len(self._last)
        self._last = seen[-BEFORE:]
        for wish in UPGRADE.finditer(seen):
            self._feed(seen[fed : wish.end()])
            fed = wish.end()
            # Only now it is known whether this is part of a body.
            if self._head is not None:
                self._feed(b"-unheard")
        self._feed(seen[fed:])
        if idle and self._head is None and self.cycle.response_complete:
            # Not a request: blank lines, or the rest of a body that nobody wanted. Uvicorn waits no more.
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        if self._head is not None and self._head > self.max_bytes:
            self._hang_up(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _feed(self, data: bytes) -> None:
        # Nothing comes after what could not be understood.
        if not self.transport.is_closing():
            super().data_received(data)

    def on_message_begin(self) -> None:
        self._end_head()
        self._head = 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._end_head()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size <= self.max_bytes and len(self.headers) <= self.max_headers:
            return super().on_headers_complete()
        served, self.app = self.app, _too_large
        try:
            super().on_headers_complete()
        finally:
            self.app = served

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        if self._looking is not None:
            self._looking.cancel()
        self.pipeline.clear()
        if self._answering is not None:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        cycle.scope[chunk_writer.KEY] = ChunkWriter(cycle, self.chunks)  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def _end_head(self) -> None:
        self._head = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._hang_up(HTTPStatus.REQUEST_TIMEOUT)
        else:  # the answer to the request before is on its way on this connection
            self._timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _look(self) -> None:
        """Whether anybody reads what keeps the connection from being closed."""
        before, self._unread = self._unread, _unread(self.transport) if self.transport.is_closing() else 0
        if self._unread == before > 0:
            # Else the kernel would go on where the transport leaves off.
            no_time = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_time)
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(UNREAD_SECONDS, self._look)

    def _hang_up(self, status: HTTPStatus) -> None:
        """There is no request yet that could be answered."""
        self._end_head()
        if not self.transport.is_closing():
            line = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
            self.transport.write(line.encode())
            self.transport.close()


def bounded(max_bytes: int, max_headers: int) -> type[BoundedProtocol]:
    """`max_bytes`: of URL and headers together."""
    own = {"max_bytes": max_bytes, "max_headers": max_headers, "chunks": ChunkBatch()}
    return type("Protocol", (BoundedProtocol,), own)


def _unread(transport: asyncio.Transport) -> int:
    """Bytes that the other side's kernel has not confirmed yet. Ours has some of them, and asks the transport
    for more only once a third of its own, perhaps megabytes, are gone: who reads slowly needs minutes for it.
    """
    kernels = b""
    with contextlib.suppress(OSError):
        kernels = ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(kernels, sys.byteorder)


async def _too_large(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(431, "the URL or the headers are too large", code="headers_too_large")
    response = error.response(scope["path"])
    response.headers["Connection"] = "close"
    await response(scope, receive, send)
