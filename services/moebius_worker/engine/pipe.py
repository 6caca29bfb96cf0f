"""The engine's end of the socket pair to the front. Blocking, for one thread."""

import contextlib
import select
import socket

from google.protobuf.message import DecodeError

from moebius_proto.worker.v1 import engine_pb2 as pb
from moebius_worker.framing import FrameError, FrameReader, encode

_READ_BYTES = 2**20


class FrontGoneError(Exception):
    """The front closed its end, or died."""


class Pipe:
    def __init__(self, connection: socket.socket) -> None:
        """`connection`: a connected stream socket, blocking."""
        self._connection = connection
        self._reader = FrameReader()
        # A byte in it ends a wait.
        self._bell, self._waking = socket.socketpair()
        self._bell.setblocking(False)
        self._waking.setblocking(False)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._poll.register(self._bell, select.POLLIN)

    def send(self, frame: pb.EngineFrame) -> None:
        """Returns when the kernel has the frame: from then on it arrives, even if this process dies."""
        try:
            self._connection.sendall(encode(frame))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise FrontGoneError from error

    def wake(self) -> None:
        """From any thread: the wait in `receive`, or the next one, ends at once."""
        with contextlib.suppress(BlockingIOError):  # it is full of wishes to be woken
            self._waking.send(b"!")

    def receive(self, timeout: float) -> list[pb.FrontFrame]:
        """The frames that have arrived, waiting for the first bytes, or to be woken, up to `timeout` seconds.

        Raises FrontGoneError when the front is gone, FrameError when what arrived cannot be understood.
        """
        ready = [fd for fd, _ in self._poll.poll(timeout * 1000)]
        if self._bell.fileno() in ready:
            self._bell.recv(_READ_BYTES)
        if self._connection.fileno() not in ready:
            return []
        try:
            data = self._connection.recv(_READ_BYTES)
        except ConnectionResetError as error:
            raise FrontGoneError from error
        if not data:
            raise FrontGoneError
        try:
            return [pb.FrontFrame.FromString(payload) for payload in self._reader.feed(data)]
        except DecodeError as error:
            raise FrameError(f"a frame from the front cannot be decoded: {error}") from error
