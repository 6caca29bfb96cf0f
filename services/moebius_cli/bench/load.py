"""Loads: requests in a closed loop (so many at a time) and in an open one (so many a second)."""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from moebius_cli.bench.result import Load
from moebius_cli.bench.stream import Stream

# Seconds that a stream of a closed loop waits after a failure: a server that refuses at once is not stormed.
PAUSE = 0.5

Send = Callable[[], Coroutine[Any, Any, Stream]]


@dataclass(frozen=True)
class Extent:
    """How long a level is: requests that are begun, or seconds in which they are. One of them is None."""

    requests: int | None
    duration: float | None

    def tickets(self) -> Iterator[None]:
        """One for each request, until there are no more. Its clock starts with the first."""
        begun = time.monotonic()
        for number in itertools.count():
            if self.requests is not None and number >= self.requests:
                return
            if self.duration is not None and time.monotonic() - begun >= self.duration:
                return
            yield


async def run(load: Load, extent: Extent, send: Send) -> list[Stream]:
    """All requests that were begun, when the last of them has ended."""
    if load.kind == "concurrency":
        return await closed_loop(int(load.value), extent, send)
    return await open_loop(load.value, extent, send, random.Random())


async def closed_loop(concurrency: int, extent: Extent, send: Send) -> list[Stream]:
    """A request follows the end of another, so that `concurrency` are open at any time."""
    streams: list[Stream] = []
    tickets = extent.tickets()

    async def one_after_another() -> None:
        for _ in tickets:
            streams.append(await send())
            if streams[-1].error is not None:
                await asyncio.sleep(PAUSE)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_after_another())
    return streams


async def open_loop(rate: float, extent: Extent, send: Send, rng: random.Random) -> list[Stream]:
    """Requests come as a Poisson process, `rate` a second in the mean, whatever became of earlier ones."""
    tasks = []
    due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in extent.tickets():
            tasks.append(group.create_task(send()))
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
    return [task.result() for task in tasks]
