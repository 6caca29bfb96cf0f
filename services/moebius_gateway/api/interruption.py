"""Work for a client ends when the client leaves, or when the gateway has to."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from moebius_gateway.api.lifecycle import Lifecycle, stopping

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


async def unless_interrupted(work: Coroutine[Any, Any, T], receive: Receive, lifecycle: Lifecycle) -> T:
    """Runs `work`. When that is in vain, cancels it and raises `ClientGoneError` or `ApiError`.

    The request's body must have been read: from then on `receive` tells of nothing but the client's leaving.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    ends: set[asyncio.Future[Any]] = {task, gone, lifecycle.cut}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError if gone.done() else stopping()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
