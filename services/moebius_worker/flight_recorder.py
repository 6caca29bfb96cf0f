"""A flight recorder: the last operations of the engine, readable by the front when the engine is dead.

Both have a file open that has no name, mapped by the engine: a ring of records of a fixed size. A record is
a sequence number, the token count, and "operation\\0backend\\0shapes" as UTF-8, cut to what fits. Writing
one is a copy, no system call.
"""

import mmap
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

_TEXT_BYTES = 240
_RECORD = struct.Struct(f"<QQ{_TEXT_BYTES}s")
_RECORDS = 256
_BYTES = _RECORDS * _RECORD.size


@dataclass(frozen=True, slots=True)
class Flight:
    """`shapes` may have been cut."""

    sequence: int
    tokens: int
    operation: str
    backend: str
    shapes: str

    @property
    def name(self) -> str:
        """As backends are excluded by."""
        return f"{self.operation}:{self.backend}"

    def __str__(self) -> str:
        return f"{self.name} with {self.tokens} tokens, {self.shapes}"


class FlightRecorder:
    """Writes to the open file `descriptor`, which becomes as large as it needs. Raises OSError."""

    def __init__(self, descriptor: int) -> None:
        os.ftruncate(descriptor, _BYTES)
        self._memory = mmap.mmap(descriptor, _BYTES)
        self._sequence = 0

    def prepare(self, operation: str, backend: str, shapes: str) -> Callable[[int], None]:
        """What is called, with the number of tokens, each time before this is done."""
        text = "\0".join((operation, backend, shapes)).encode()[:_TEXT_BYTES]
        return partial(self._note, text)

    def _note(self, text: bytes, tokens: int) -> None:
        sequence = self._sequence
        self._sequence = sequence + 1
        _RECORD.pack_into(self._memory, sequence % _RECORDS * _RECORD.size, sequence + 1, tokens, text)


def read_flights(descriptor: int) -> list[Flight]:
    """What was last noted in the file, the latest first; empty if there is nothing to read."""
    try:
        data = os.pread(descriptor, _BYTES, 0)
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


def suspect(flights: Sequence[Flight]) -> Flight | None:
    """Whom to blame for a fault in an engine that waited for each operation, of `flights` with the latest
    first: what ran. None: no backend of ours did; references are PyTorch's own."""
    return next((flight for flight in flights[:1] if flight.backend != "reference"), None)
