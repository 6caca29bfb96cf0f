"""A flight recorder: the last operations of a process in a file, readable when the process is dead.

The file is shared memory of a fixed size: a ring of records. A record is a sequence number, the token count,
and "operation\\0backend\\0shapes" as UTF-8, cut to what fits. Writing one is a copy, no system call.
"""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TEXT_BYTES = 240
_RECORD = struct.Struct(f"<QQ{_TEXT_BYTES}s")
_RECORDS = 256


@dataclass(frozen=True, slots=True)
class Flight:
    """`shapes` may have been cut."""

    sequence: int
    tokens: int
    operation: str
    backend: str
    shapes: str

    @property
    def is_reference(self) -> bool:
        return self.backend == "reference"

    def __str__(self) -> str:
        return f"{self.operation}:{self.backend} with {self.tokens} tokens, {self.shapes}"


class FlightRecorder:
    """Writes to the file at `path`, which is made, or emptied if it is there. Raises OSError."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _RECORDS * _RECORD.size)
            self._memory = mmap.mmap(descriptor, _RECORDS * _RECORD.size)
        finally:
            os.close(descriptor)
        self._sequence = 0

    @staticmethod
    def record(operation: str, backend: str, shapes: str) -> bytes:
        """What `note` takes; made once for many."""
        text = "\0".join((operation, backend, shapes)).encode()[:_TEXT_BYTES]
        return text.ljust(_TEXT_BYTES, b"\0")

    def note(self, record: bytes, tokens: int) -> None:
        """Says that this is done next."""
        sequence = self._sequence
        self._sequence = sequence + 1
        _RECORD.pack_into(self._memory, sequence % _RECORDS * _RECORD.size, sequence + 1, tokens, record)

    def close(self) -> None:
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_flights(path: Path) -> list[Flight]:
    """What the recorder at `path` last noted, the latest first; empty if there is nothing to read."""
    try:
        data = path.read_bytes()
    except OSError:
        return []
    flights = []
    for sequence, tokens, record in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
        text = record.rstrip(b"\0").decode(errors="replace")
        operation, _, rest = text.partition("\0")
        backend, _, shapes = rest.partition("\0")
        if sequence:
            flights.append(Flight(sequence, tokens, operation, backend, shapes))
    return sorted(flights, key=lambda flight: flight.sequence, reverse=True)


def blame(flights: list[Flight]) -> Flight | None:
    """The one to suspect in a GPU fault: work on a GPU fails after it was asked for, and references are
    PyTorch's own, so it is the last that was not a reference."""
    return next((flight for flight in flights if not flight.is_reference), None)
