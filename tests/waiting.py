"""Waiting for what other tasks, threads and processes bring about.

What is waited for comes soon; the limit is for what never comes, and wide: a busy machine is no failure.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02


async def until(condition: Callable[[], Any], what: str = "it comes about", seconds: float = PATIENCE) -> Any:
    """Awaits that `condition()`, asked again and again, is true; returns its value. It may be async."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def wait_for(condition: Callable[[], Any], what: str = "it comes about", seconds: float = PATIENCE) -> Any:
    """The same, where no event loop runs."""
    deadline = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
    return value
