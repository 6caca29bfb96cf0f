"""`moebius-controller`: reads its settings and keeps the workers alive until a signal."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence

import structlog
from prometheus_client import CollectorRegistry

from moebius_cluster.errors import ClusterError
from moebius_common.http_listener import Probe, serve_http
from moebius_common.logs import configure_logs
from moebius_common.settings import read_settings
from moebius_controller.control import Controller
from moebius_controller.local.driver import LocalDriver
from moebius_controller.metrics import ControllerMetrics
from moebius_controller.settings import ControllerSettings
from moebius_controller.spec import StackFileError, StackSpec, read_stack
from moebius_controller.state_file import FileMemory, StateFileError, load_state
from moebius_controller.types import History
from moebius_proto.channel import keep_grpc

STATE_FILE = "controller.json"
PROCESSES_LOOK_INTERVAL = 0.25
PODS_LOOK_INTERVAL = 1.0

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM or SIGINT. Processes end with it, at a second signal at once; pods stay."""
    settings = read_settings(ControllerSettings, arguments)
    configure_logs(settings.log_format)
    log.info("settings", **settings.model_dump(mode="json"))
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    if settings.stack is not None and settings.driver == "local":
        try:
            stack = read_stack(settings.stack)
        except StackFileError as error:
            sys.exit(f"moebius-controller: {error}")
        asyncio.run(_keep_processes(settings, stack, registry, metrics))
    else:
        asyncio.run(_keep_pods(settings, registry, metrics))


async def _keep_processes(
    settings: ControllerSettings, stack: StackSpec, registry: CollectorRegistry, metrics: ControllerMetrics
) -> None:
    assert settings.stack is not None
    keep_grpc()
    memory = FileMemory(settings.stack.with_name(STATE_FILE))
    driver = LocalDriver(stack.workers, _history(settings))
    controller = Controller(driver, settings.policy(), memory, metrics)
    if settings.metrics_listen is not None:
        _serve_http(settings.metrics_listen, registry, controller.alive, controller.alive)
    metrics.leads(True)
    stop, hurry = asyncio.Event(), asyncio.Event()
    _on_signals(stop, hurry, driver.wake)
    try:
        await controller.run(settings.look_interval or PROCESSES_LOOK_INTERVAL, stop)
    finally:
        await driver.stop(settings.stop_grace, hurry)
        await controller.save(time.time())


async def _keep_pods(
    settings: ControllerSettings, registry: CollectorRegistry, metrics: ControllerMetrics
) -> None:
    # Its client takes a second to load, and is not in every installation.
    from moebius_controller.kubernetes.driver import PodDriver, open_cluster

    try:
        cluster = open_cluster(settings)
    except ClusterError as error:
        sys.exit(f"moebius-controller: {error}")
    keep_grpc()
    driver = PodDriver(cluster, settings, metrics)
    controller = Controller(driver, settings.policy(), driver.memory, metrics)
    if settings.metrics_listen is not None:
        _serve_http(settings.metrics_listen, registry, controller.alive, driver.synced)
    stop = asyncio.Event()
    _on_signals(stop, asyncio.Event(), driver.wake)
    async with driver:
        await controller.run(settings.look_interval or PODS_LOOK_INTERVAL, stop)


def _serve_http(address: str, registry: CollectorRegistry, alive: Probe, ready: Probe) -> None:
    """`alive`: the loop turns. `ready`: the workers can be seen; who does not lead is ready as well."""
    try:
        serve_http(address, registry, {"/healthz": alive, "/readyz": ready})
    except OSError as error:
        sys.exit(
            f"moebius-controller: cannot serve metrics on {address} ({error.strerror}): "
            "choose another with --metrics-listen"
        )


def _on_signals(stop: asyncio.Event, hurry: asyncio.Event, wake: Callable[[], None]) -> None:
    """Sets `stop` at the first, `hurry` at the second."""

    def on_signal(number: signal.Signals) -> None:
        log.info("stopping", signal=number.name, at_once=stop.is_set())
        (hurry if stop.is_set() else stop).set()
        wake()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


def _history(settings: ControllerSettings) -> History:
    """What the controller before this one left, for the numbers of its processes."""
    assert settings.stack is not None
    try:
        before = load_state(settings.stack.with_name(STATE_FILE))
    except StateFileError:
        return {}  # Said by the controller, which reads it as well.
    return before.history if before else {}
