"""The gateway's process: settings, signals, the HTTP server."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

import structlog
import uvicorn
import uvloop
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from starlette.types import ASGIApp

from moebius_common.logs import configure_logs
from moebius_common.settings import read_settings
from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.app import build_app
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.workers.dispatcher import Dispatcher, DispatcherOptions
from moebius_gateway.workers.metrics import DispatcherMetrics

logger = structlog.get_logger(__name__)

# Seconds that connections have to close once all requests are answered or cut off.
CLOSE_SECONDS = 2
# Connections may be idle for so long: longer than clients and proxies keep theirs, so that none of them uses
# a connection that is just being closed.
IDLE_SECONDS = 75
# Connections that may wait to be accepted.
BACKLOG = 2048


def main() -> None:
    """Runs until SIGTERM or SIGINT.

    Exit status: 0 after draining, 1 when it cannot start, 2 if the settings are wrong.
    """
    settings = read_settings(GatewaySettings)
    try:
        listener = _listen(*settings.address)
    except OSError as error:
        sys.exit(
            f"moebius-gateway: cannot listen on {settings.listen} ({error.strerror}): "
            "stop what uses this address, or choose another with --listen"
        )
    configure_logs(settings.log_format, settings.log_level)
    logger.info(
        "starting", address="{}:{}".format(*listener.getsockname()[:2]), **settings.model_dump(mode="json")
    )
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listener))


def _listen(host: str, port: int) -> socket.socket:
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


async def _serve(settings: GatewaySettings, listener: socket.socket) -> None:
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    options = DispatcherOptions(
        workers=settings.workers,
        gateway_id=settings.gateway_id,
        silence_timeout=settings.silence_timeout,
        max_waiting=settings.max_waiting,
    )
    lifecycle = Lifecycle()
    app = build_app(settings, Dispatcher(options, DispatcherMetrics(registry)), lifecycle, registry)
    server = GatewayServer(app, lifecycle, settings.drain_grace)
    await server.serve(sockets=[listener])
    if not server.started:
        sys.exit("moebius-gateway: could not start; the log says why")


class GatewayServer(uvicorn.Server):
    """Uvicorn, but a signal first drains; the listener stays open meanwhile, so that probes see why."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, grace: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=IDLE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )
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
