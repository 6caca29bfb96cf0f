"""Chunks of streamed answers go straight to their connections, those of all answers together.

ASGI's way to a connection leads through the wrappers of every middleware. They look at nothing but the start
of a response, and cost more for each token than what they wrap.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

# Where a request's `ChunkWriter` is in its ASGI scope.
KEY = "moebius.chunk_writer"
# Bytes that wait to be written together, at most: not more, so that an answer that is made without a pause
# notices that its client makes no room.
MAX_WAITING = 1 << 20


class ChunkBatch:
    """What is to be written to any connection before the event loop looks for new events.

    A step of a worker brings tokens for many answers. Each connection needs a system call of its own, but in
    a row they find the kernel's code in the caches of the CPU, and clients that they wake do not get between
    one answer's token and the next one's.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[RequestResponseCycle, bytes]] = []
        self._size = 0

    def add(self, response: RequestResponseCycle, chunk: bytes) -> None:
        if not self._chunks:
            # Behind everything that is ready to run by now.
            asyncio.get_running_loop().call_soon(self.flush)
        self._chunks.append((response, chunk))
        self._size += len(chunk)
        if self._size > MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        chunks, self._chunks, self._size = self._chunks, [], 0
        for response, chunk in chunks:
            if not response.transport.is_closing():
                response.transport.write(chunk)


class ChunkWriter:
    """The short way to one connection, for the middle of a chunked body."""

    __slots__ = ("_batch", "_flow", "_response")

    def __init__(self, response: RequestResponseCycle, batch: ChunkBatch) -> None:
        self._response = response
        self._flow = response.flow
        self._batch = batch

    def write(self, data: bytes) -> bool:
        """Writes a chunk soon. Says False, and does not, when it has to be sent by way of ASGI: the response
        has not begun or is over, is not chunked, or the client must make room first."""
        response = self._response
        if (
            self._flow.write_paused
            or not response.chunked_encoding
            or response.response_complete
            or response.disconnected
        ):
            return False
        self._batch.add(response, b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def flush(self) -> None:
        """To be called before something is sent by way of ASGI: what was written comes before."""
        self._batch.flush()
