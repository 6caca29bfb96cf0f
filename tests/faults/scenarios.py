"""Fault scenarios as data: what happens to which process, and when, while 16 streams run."""

import signal
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """Sends `signal` to a process of worker number `worker` when clients have seen `at_chunk` chunks."""

    at_chunk: int
    target: Literal["engine", "front"]
    signal: signal.Signals
    worker: int = 0


@dataclass(frozen=True)
class Scenario:
    name: str
    workers: int
    events: tuple[Event, ...]


SCENARIOS = (
    Scenario("engine killed", 2, (Event(100, "engine", signal.SIGKILL),)),
    Scenario("worker killed", 2, (Event(100, "front", signal.SIGKILL),)),
    Scenario(
        "engine killed, then a worker",
        2,
        (Event(100, "engine", signal.SIGKILL), Event(500, "front", signal.SIGKILL, worker=1)),
    ),
    Scenario("worker stopped", 2, (Event(100, "front", signal.SIGSTOP),)),
    Scenario("engine stopped", 2, (Event(100, "engine", signal.SIGSTOP),)),
    Scenario("engine of the only worker killed", 1, (Event(100, "engine", signal.SIGKILL),)),
    Scenario("only worker killed", 1, (Event(100, "front", signal.SIGKILL),)),
)
