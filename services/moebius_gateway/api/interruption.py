"""Work for a client ends when the client leaves, when its time is over, or the gateway has to."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from moebius_gateway.api.errors import ApiError, of_generation
from moebius_gateway.api.lifecycle import Lifecycle, stopping
from moebius_gateway.types import GenerationError, Reason

# Seconds that work gets beyond its deadline: it keeps that by itself, and says more about why, unless it
# waits for a client that does not read.
SLACK = 1.0

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def unless_interrupted(
    work: Coroutine[Any, Any, T], receive: Receive, lifecycle: Lifecycle, deadline: float
) -> T:
    """Runs `work`. When that is in vain, cancels it and raises `ClientGoneError` or `ApiError`.

    `deadline` is on the clock of time.monotonic().
    The request's body must have been read: from then on `receive` tells of nothing but the client's leaving.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    ends: set[asyncio.Future[Any]] = {task, gone, lifecycle.cut}
    try:
        remaining = max(deadline + SLACK - time.monotonic(), 0.0)
        await asyncio.wait(ends, timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise ClientGoneError
        raise stopping() if lifecycle.cut.done() else _too_late()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _too_late() -> ApiError:
    message = "The deadline passed before the answer was read: read faster, or allow more time"
    return of_generation(GenerationError(Reason.NOT_READY, message, retryable=True))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
