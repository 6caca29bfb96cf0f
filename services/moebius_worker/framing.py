"""Frames between front and engine: a length (4 bytes, little endian), then so many bytes of a message."""

import struct
from collections.abc import Iterator

from google.protobuf.message import Message

_LENGTH = struct.Struct("<I")
# A prompt of a million tokens is below 4 MiB: a longer frame means that the two sides lost step.
MAX_FRAME_BYTES = 256 * 2**20


class FrameError(Exception):
    """What arrived is no frame. The connection cannot be used any more."""


def encode(message: Message) -> bytes:
    payload = message.SerializeToString()
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts a stream of bytes, fed in any pieces, into payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the payloads that `data` completes. Raises FrameError on an impossible length."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes is announced; the limit is {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield payload
