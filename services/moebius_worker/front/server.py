"""The front process: gRPC server, supervisor, heartbeat, signals; from start to the end of the drain."""

import asyncio
import os
import signal
import time

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from moebius_common.address import split_address
from moebius_common.http_listener import Probe, serve_http
from moebius_proto.worker.v1 import worker_pb2, worker_pb2_grpc
from moebius_worker.front.engine_process import EngineProcess
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.service import WorkerService
from moebius_worker.front.standby import Standby, StartEngine
from moebius_worker.front.state import WorkerState
from moebius_worker.front.supervisor import Supervisor
from moebius_worker.front.tls import server_credentials
from moebius_worker.metrics import RequestMetrics, WorkerCollector
from moebius_worker.settings import WorkerSettings, WorkerTls

HEALTH_SERVICES = ("", "moebius.worker.v1.Worker")
# Serving as long as the front answers, whatever its engine does: what a liveness probe may ask.
LIVENESS_SERVICE = "liveness"
HEARTBEAT_SECONDS = 1.0
# Without a heartbeat for so long the front hangs.
HEARTBEAT_LOST_SECONDS = 30.0
# What the last frames get to reach the gateways when the worker ends.
FAREWELL_SECONDS = 0.3
_MESSAGE_BYTES = 64 * 2**20
SERVER_OPTIONS = (
    # Two workers on one port would share its gateways at random.
    ("grpc.so_reuseport", 0),
    # A prompt of 100,000 tokens is below 0.5 MiB.
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    # A gateway that vanished without a word is noticed, and its requests are cancelled.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # By default a server answers pings on a quiet connection, more than one in five minutes, by closing it
    # with all its streams.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)

log = structlog.get_logger(__name__)


class ListenError(Exception):
    """The address cannot be listened on."""


class Stop:
    """The first `ask` is for an orderly end, the second for an end at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def ask(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def on_signals(self) -> None:
        """Each SIGTERM or SIGINT asks."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.ask)


async def serve(settings: WorkerSettings, stop: Stop, start: StartEngine = EngineProcess.start) -> None:
    """Runs the worker until it is asked to stop. Raises ListenError when a port is taken."""
    registry = CollectorRegistry()
    state = WorkerState(pid=os.getpid())
    exchange = Exchange(state, RequestMetrics(registry))
    registry.register(WorkerCollector(state, exchange))
    health_service = health.aio.HealthServicer()

    async def changed() -> None:
        exchange.broadcast(state.status())
        ready = state.state == worker_pb2.STATE_READY
        serving = health_pb2.HealthCheckResponse
        for name in HEALTH_SERVICES:
            await health_service.set(name, serving.SERVING if ready else serving.NOT_SERVING)

    standby = Standby(settings.standby, start)
    last_beat = time.monotonic()

    async def heartbeat() -> None:
        nonlocal last_beat
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            last_beat = time.monotonic()
            exchange.broadcast(state.status())

    probes: dict[str, Probe] = {
        "/livez": lambda: time.monotonic() - last_beat < HEARTBEAT_LOST_SECONDS,
        "/readyz": lambda: state.state == worker_pb2.STATE_READY,
    }
    await changed()
    await health_service.set(LIVENESS_SERVICE, health_pb2.HealthCheckResponse.SERVING)
    service = WorkerService(state, exchange, changed)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    address = _listen(server, settings.listen, settings.tls)
    metrics = _listen_http(settings, registry, probes)
    await server.start()
    log.info("listening", address=address, metrics=metrics)
    try:
        async with asyncio.TaskGroup() as group:
            supervising = group.create_task(Supervisor(settings, state, exchange, changed, standby).run())
            beating = group.create_task(heartbeat())
            await stop.first.wait()
            await _drain(service, exchange, settings.drain_timeout, stop.second)
            supervising.cancel()
            beating.cancel()
    finally:
        await standby.end()
        await server.stop(None if stop.second.is_set() else FAREWELL_SECONDS)


async def _drain(service: WorkerService, exchange: Exchange, seconds: float, hurry: asyncio.Event) -> None:
    log.info("draining", requests=exchange.in_flight, seconds=seconds)
    drained = asyncio.create_task(service.drain(seconds))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
    drained.cancel()
    hurried.cancel()
    await asyncio.wait({drained, hurried})
    log.info("ending", requests=exchange.in_flight)
    exchange.give_up("the worker ends")


def _listen(server: grpc.aio.Server, address: str, tls: WorkerTls | None) -> str:
    """Binds; returns the address with the port that was taken."""
    host, _ = split_address(address)
    try:
        credentials = None if tls is None else server_credentials(tls)
    except OSError as error:
        raise ListenError(f"a TLS file cannot be read: {error}") from error
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ListenError(
            f"cannot listen on {address}: is the port taken? Choose another with --listen"
        ) from error
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_http(
    settings: WorkerSettings, registry: CollectorRegistry, probes: dict[str, Probe]
) -> str | None:
    if settings.metrics_listen is None:
        return None
    host, _ = split_address(settings.metrics_listen)
    try:
        return f"{host}:{serve_http(settings.metrics_listen, registry, probes)}"
    except OSError as error:
        raise ListenError(
            f"cannot serve metrics on {settings.metrics_listen}: {error.strerror}; choose another address"
        ) from error
