"""A gateway that notes what each of its routing decisions took: hashing the prompt's blocks, and the choice.

Run: python -m tests.bench.timed_gateway FILE [flags of moebius-gateway]
"""

import resource
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import orjson

from moebius_gateway.main import main
from moebius_gateway.workers import routing
from moebius_gateway.workers.dispatcher import Dispatcher


@dataclass
class Spent:
    """Seconds by the clock, seconds of the thread's CPU, and how often that thread left its CPU."""

    wall: float
    cpu: float
    switches: int


def switches() -> int:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nivcsw + usage.ru_nvcsw


def begin() -> Spent:
    left, cpu = switches(), time.thread_time()
    return Spent(time.perf_counter(), cpu, left)


def since(begun: Spent) -> Spent:
    wall, cpu = time.perf_counter(), time.thread_time()
    return Spent(wall - begun.wall, cpu - begun.cpu, switches() - begun.switches)


def note_decisions() -> list[Spent]:
    """From now on each is in this list, once it is made."""
    decisions: list[Spent] = []
    begun: list[Spent] = []
    prefix_blocks, choose = routing.prefix_blocks, Dispatcher._choose

    def hash_first(*arguments: Any) -> tuple[int, ...]:
        begun.append(begin())
        return prefix_blocks(*arguments)

    def then_choose(*arguments: Any) -> Any:
        # Nobody else runs between a request's hashing and its first choice; a later choice hashes nothing.
        start = begun.pop() if begun else begin()
        choice = choose(*arguments)
        decisions.append(since(start))
        return choice

    routing.prefix_blocks = hash_first
    Dispatcher._choose = then_choose  # type: ignore[method-assign]
    return decisions


if __name__ == "__main__":
    file = Path(sys.argv.pop(1))
    decisions = note_decisions()
    try:
        main()
    finally:
        file.write_bytes(orjson.dumps([astuple(one) for one in decisions]))
