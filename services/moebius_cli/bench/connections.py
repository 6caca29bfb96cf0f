"""Connections to an endpoint, kept open."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType

import httpx

CONNECT_SECONDS = 10.0


class Connections:
    """As many clients as are needed at the same time, of one connection each.

    One client for all looks through all its connections at each request and at each end of one: with some
    hundreds, that would take longer than what is measured.
    """

    def __init__(self, url: httpx.URL, api_key: str | None) -> None:
        """`url`: the API's root, to which paths are relative."""
        self.url = url
        # A compressed stream would be timed by its compressor's blocks.
        self._headers = {"Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # Made once: it takes tens of milliseconds.
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._idle: list[httpx.AsyncClient] = []
        self._open = AsyncExitStack()

    async def __aenter__(self) -> "Connections":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    @asynccontextmanager
    async def one(self) -> AsyncIterator[httpx.AsyncClient]:
        """Of those that are idle, the one that was used last."""
        client = self._idle.pop() if self._idle else await self._open.enter_async_context(self._new())
        try:
            yield client
        finally:
            self._idle.append(client)

    def _new(self) -> httpx.AsyncClient:
        """No proxy stands between; how long an answer may take is another's concern."""
        return httpx.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            verify=self._tls,
            trust_env=False,
        )
