"""The gateway's process: settings, listeners, the servers."""

import asyncio
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import structlog
import uvloop
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector

from moebius_cluster.errors import ClusterError
from moebius_common.address import split_address
from moebius_common.garbage import spare_what_is_there
from moebius_common.logs import configure_logs
from moebius_common.settings import read_settings
from moebius_gateway.allocator import use_few_arenas
from moebius_gateway.api.admin import build_admin_app
from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.app import build_app, build_services
from moebius_gateway.auth.keys import KeysError
from moebius_gateway.http_protocol import bounded
from moebius_gateway.server import GatewayServer, Server, listen
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.tls import ServerTls
from moebius_gateway.workers.dispatcher import Dispatcher, DispatcherOptions
from moebius_gateway.workers.metrics import DispatcherMetrics

logger = structlog.get_logger(__name__)


def main() -> None:
    """Runs until SIGTERM or SIGINT.

    Exit status: 0 after draining, 1 when it cannot start, 2 if the settings are wrong.
    """
    use_few_arenas()
    settings = read_settings(GatewaySettings)
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(settings.listen, "--listen"))
        admin = None
        if settings.admin_listen is not None:
            admin = stack.enter_context(_listen(settings.admin_listen, "--admin-listen"))
        configure_logs(settings.log_format, settings.log_level)
        logger.info(
            "starting",
            address=_address(listener),
            admin_address=None if admin is None else _address(admin),
            **settings.model_dump(mode="json"),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(_serve(settings, listener, admin))
            except (KeysError, OSError, ClusterError) as error:
                sys.exit(f"moebius-gateway: {error}")


def _listen(address: str, flag: str) -> socket.socket:
    try:
        return listen(*split_address(address))
    except OSError as error:
        sys.exit(
            f"moebius-gateway: cannot listen on {address} ({error.strerror}): "
            f"stop what uses this address, or choose another with {flag}"
        )


def _address(listener: socket.socket) -> str:
    return "{}:{}".format(*listener.getsockname()[:2])


async def _serve(settings: GatewaySettings, listener: socket.socket, admin: socket.socket | None) -> None:
    """Raises `KeysError` and `OSError` for files that cannot be used, and `ClusterError`."""
    registry = CollectorRegistry()
    for collector in (PlatformCollector, GCCollector):
        collector(registry=registry)
    options = DispatcherOptions(
        workers=settings.workers,
        gateway_id=settings.gateway_id,
        silence_timeout=settings.silence_timeout,
        max_waiting=settings.max_waiting,
        max_wait=settings.max_wait,
        tls=settings.worker_tls,
    )
    lifecycle = Lifecycle()
    metrics = DispatcherMetrics(registry)
    dispatcher = Dispatcher(options, metrics)
    services = build_services(settings, dispatcher, lifecycle, registry)
    protocol = bounded(settings.max_header_bytes, settings.max_headers)
    tasks: list[asyncio.Task[None]] = []
    tls = None
    if settings.tls_cert is not None and settings.tls_key is not None:
        tls = ServerTls(settings.tls_cert, settings.tls_key)
        tasks.append(asyncio.create_task(tls.keep_current()))
    public = GatewayServer(
        build_app(services), protocol, tls.context if tls else None, lifecycle, settings.drain_grace
    )
    if admin is not None:
        tasks.append(asyncio.create_task(Server(build_admin_app(services), protocol).serve([admin])))
    spare_what_is_there()
    with _discovery(settings, dispatcher, metrics):
        await public.serve([listener])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if not public.started:
        sys.exit("moebius-gateway: could not start; the log says why")


@contextmanager
def _discovery(
    settings: GatewaySettings, dispatcher: Dispatcher, metrics: DispatcherMetrics
) -> Iterator[None]:
    """Keeps the dispatcher told of the workers, if they are to be found. Raises `ClusterError`."""
    if settings.discover_selector is None:
        yield
        return
    # The client of the Kubernetes API is large, and most gateways outside of a cluster do without.
    from moebius_gateway.workers.discovery import DiscoveryOptions, discover

    options = DiscoveryOptions(settings.discover_selector, settings.discover_namespace)
    discovery = discover(options, dispatcher.set_workers, metrics)
    discovery.start()
    try:
        yield
    finally:
        discovery.stop()
