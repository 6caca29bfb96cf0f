"""Whether the gateway takes requests, and what it still has to finish before it may end."""

import asyncio
import contextlib
from collections.abc import Iterator

from moebius_gateway.api.errors import SERVER_ERROR, ApiError


class Lifecycle:
    """Serving, then draining (nothing new, what runs may finish), then cut off."""

    def __init__(self) -> None:
        self.draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Done when what still runs must end.
        self.cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Spans a request that the end of the process has to wait for."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def check_admission(self) -> None:
        """Raises `ApiError` if no generation may be started any more."""
        if self.draining:
            raise stopping()

    async def close(self, patience: float) -> int:
        """Takes nothing new. Waits until nothing runs, at most so many seconds; returns how many still do."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), patience)
        return self._in_flight

    async def drain(self, grace: float) -> bool:
        """Waits until nothing runs, at most `grace` seconds, then cuts off. Says whether all finished."""
        left = await self.close(grace)
        if not self.cut.done():
            self.cut.set_result(None)
        return not left


def stopping() -> ApiError:
    return ApiError(
        503, "this gateway is stopping; send the request again", SERVER_ERROR, code="draining", retry_after=1
    )
