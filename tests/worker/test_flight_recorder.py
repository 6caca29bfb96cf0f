"""What the flight recorder keeps, and whom it makes suspect."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from moebius_worker.flight_recorder import FlightRecorder, read_flights, suspect


@pytest.fixture
def descriptor() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        yield file.fileno()


def test_the_latest_comes_first(descriptor: int) -> None:
    recorder = FlightRecorder(descriptor)
    for tokens in range(1, 600):
        recorder.prepare("linear", f"backend {tokens}", "x")(tokens)
    flights = read_flights(descriptor)
    assert [flight.tokens for flight in flights] == [*range(599, 599 - 256, -1)]
    assert all(flight.backend == f"backend {flight.tokens}" for flight in flights)
    assert flights[0].sequence == 599


def test_what_is_too_long_is_cut_and_may_end_within_a_character(descriptor: int) -> None:
    FlightRecorder(descriptor).prepare("linear", "fast", "µ" * 500)(3)
    [flight] = read_flights(descriptor)
    assert (flight.name, flight.tokens) == ("linear:fast", 3)
    assert flight.shapes.startswith("µ" * 100)


@pytest.mark.parametrize("contents", [b"", b"half a record", bytes(100_000)])
def test_where_nothing_was_noted_nothing_is_read(descriptor: int, contents: bytes) -> None:
    os.write(descriptor, contents)
    assert read_flights(descriptor) == []


def test_a_file_that_is_closed_says_nothing() -> None:
    with tempfile.TemporaryFile() as file:
        descriptor = file.fileno()
    assert read_flights(descriptor) == []


DIES = """
import os, signal, sys
from moebius_worker.flight_recorder import FlightRecorder
recorder = FlightRecorder(int(sys.argv[1]))
recorder.prepare("routed_experts", "triton", "x=bfloat16[2048]")(7)
recorder.prepare("rms_norm", "reference", "x=bfloat16[2048]")(7)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_is_readable_when_its_process_was_killed(descriptor: int) -> None:
    command = [sys.executable, "-c", DIES, str(descriptor)]
    assert subprocess.run(command, pass_fds=(descriptor,), check=False).returncode == -9
    flights = read_flights(descriptor)
    assert [str(flight) for flight in flights] == [
        "rms_norm:reference with 7 tokens, x=bfloat16[2048]",
        "routed_experts:triton with 7 tokens, x=bfloat16[2048]",
    ]
    # The reference ran.
    assert suspect(flights) is None
    assert suspect(flights[1:]) is flights[1]


def test_where_nothing_is_noted_nobody_is_suspected() -> None:
    assert suspect([]) is None
