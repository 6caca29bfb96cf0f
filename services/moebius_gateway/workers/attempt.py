"""One submission of a generation to one worker, from submit until its handle is dead."""

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from moebius_gateway.journal import Failure
from moebius_gateway.types import Tokens
from moebius_gateway.workers import wire


class Attempt:
    """What a link received for one handle and nobody has taken yet.

    A context manager: leaving it tells the worker to stop unless the handle is dead already.
    `length`: tokens submitted. `deadline` is on the clock of time.monotonic().
    """

    __slots__ = (
        "_close",
        "_deadline",
        "_expired",
        "_failure",
        "_loop",
        "_timer",
        "_tokens",
        "_waiter",
        "begun",
        "handle",
        "kv_tokens",
        "suspect",
    )

    def __init__(
        self, handle: int, length: int, deadline: float, close: Callable[[int], None], *, suspect: bool
    ) -> None:
        self.handle = handle
        self.suspect = suspect
        # Whether a token has come.
        self.begun = False
        # What it takes of the worker's KV cache that nobody else has there.
        self.kv_tokens = length
        self._deadline = deadline
        self._close = close
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        self._loop = asyncio.get_running_loop()
        # Who waits in `next`: a bare future, for an event makes one of its own for every wait.
        self._waiter: asyncio.Future[None] | None = None
        self._tokens: list[Tokens] = []
        self._failure: Failure | None = None

    def push(self, tokens: Tokens) -> None:
        self._tokens.append(tokens)
        self.begun = True
        self.kv_tokens += len(tokens.token_ids) - tokens.cached_tokens
        if tokens.finish_reason is not None and self._timer is not None:
            # Finished in time, however late it is read.
            self._timer.cancel()
        self._wake()

    def fail(self, failure: Failure) -> None:
        """Ends it after what was pushed before."""
        self._failure = failure
        self._wake()

    async def next(self) -> Tokens | Failure:
        """All tokens that came since the last call, at least one piece; or why there are no more.

        Raises TimeoutError once the deadline has passed.
        """
        if not self._tokens and self._failure is None and not self._expired:
            self._waiter = self._loop.create_future()
            await self._waiter
        if self._expired:
            raise TimeoutError
        if self._tokens:
            pieces, self._tokens = self._tokens, []
            return wire.merged(pieces)
        assert self._failure is not None
        return self._failure

    def _expire(self) -> None:
        self._expired = True
        self._wake()

    def _wake(self) -> None:
        # One that was cancelled is done too.
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __enter__(self) -> "Attempt":
        remaining = self._deadline - time.monotonic()
        self._timer = self._loop.call_later(max(remaining, 0.0), self._expire)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._close(self.handle)
