"""Waiting for what other tasks, threads and processes bring about.

What is waited for comes soon; the limit is for what never comes, and wide: a busy machine is no failure.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 60.0


async def until(condition: Callable[[], Any], what: str = "it comes about", seconds: float = PATIENCE) -> Any:
    """Awaits that `condition()`, asked again and again, is true; returns its value. It may be async."""
    pauses = _pauses(what, seconds)
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        await asyncio.sleep(next(pauses))


def wait_for(condition: Callable[[], Any], what: str = "it comes about", seconds: float = PATIENCE) -> Any:
    """The same, where no event loop runs."""
    pauses = _pauses(what, seconds)
    while not (value := condition()):
        time.sleep(next(pauses))
    return value


def _pauses(what: str, seconds: float) -> Iterator[float]:
    """Short at first: what comes soon is seen soon."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while time.monotonic() < deadline:
        yield pause
        pause = min(pause * 1.5, 0.02)
    raise AssertionError(f"not within {seconds} s: {what}")
