"""The HTTP servers: the public one, which drains at a signal, and that for those who run the gateway."""

import asyncio
import contextlib
import signal
import socket
import ssl
from collections.abc import Iterator

import structlog
import uvicorn
from starlette.types import ASGIApp

from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.http_protocol import BoundedProtocol

logger = structlog.get_logger(__name__)

# Seconds that connections have to close once all requests are answered or cut off.
CLOSE_SECONDS = 2
# Connections may be idle for so long: longer than clients and proxies keep theirs, so that none of them uses
# a connection that is just being closed.
IDLE_SECONDS = 75
# Connections that may wait to be accepted.
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections from now on. Raises `OSError` if the address cannot be had."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class Server(uvicorn.Server):
    """Signals are not its business."""

    def __init__(
        self,
        app: ASGIApp,
        protocol: type[BoundedProtocol],
        tls: ssl.SSLContext | None = None,
        *,
        lifespan: bool = False,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                lifespan="on" if lifespan else "off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer(Server):
    """A signal first drains; the listener stays open meanwhile, so that probes see why."""

    def __init__(
        self,
        app: ASGIApp,
        protocol: type[BoundedProtocol],
        tls: ssl.SSLContext | None,
        lifecycle: Lifecycle,
        grace: float,
    ) -> None:
        super().__init__(app, protocol, tls, lifespan=True)
        self._lifecycle = lifecycle
        self._grace = grace

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handlers, which close the listener at once and die of the signal at the end."""
        loop = asyncio.get_running_loop()
        drain: asyncio.Task[None] | None = None

        def on_signal(number: signal.Signals) -> None:
            nonlocal drain
            if drain is None:
                logger.info("draining", signal=number.name, grace=self._grace)
                drain = loop.create_task(self._drain())
            else:
                logger.warning("stopping at once", signal=number.name)
                self.should_exit = self.force_exit = True

        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            if drain is not None:
                drain.cancel()

    async def _drain(self) -> None:
        if not await self._lifecycle.drain(self._grace):
            logger.warning("requests were cut off at the end of the grace period")
        self.should_exit = True
