"""`moebius-controller`: reads settings and stack file, and keeps the workers alive until a signal."""

import asyncio
import signal
import sys
from collections.abc import Sequence

import structlog
from prometheus_client import CollectorRegistry, start_http_server

from moebius_common.address import split_address
from moebius_common.logs import configure_logs
from moebius_common.settings import read_settings
from moebius_controller.control import Controller
from moebius_controller.local.driver import LocalDriver
from moebius_controller.metrics import ControllerMetrics
from moebius_controller.settings import ControllerSettings
from moebius_controller.spec import StackFileError, StackSpec, read_stack
from moebius_controller.state_file import ControllerState, StateFileError, load_state

STATE_FILE = "controller.json"

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs until SIGTERM or SIGINT, then ends the workers; a second signal kills them."""
    settings = read_settings(ControllerSettings, arguments)
    configure_logs(settings.log_format)
    log.info("settings", **settings.model_dump(mode="json"))
    registry = CollectorRegistry()
    metrics = ControllerMetrics(registry)
    try:
        stack = read_stack(settings.stack)
    except StackFileError as error:
        sys.exit(f"moebius-controller: {error}")
    if settings.metrics_listen is not None:
        _serve_metrics(settings.metrics_listen, registry)
    asyncio.run(_control(settings, stack, metrics))


async def _control(settings: ControllerSettings, stack: StackSpec, metrics: ControllerMetrics) -> None:
    state_path = settings.stack.with_name(STATE_FILE)
    before = _load(settings)
    driver = LocalDriver(stack.workers, before.history if before else {})
    controller = Controller(driver, settings.policy(), state_path, metrics, before)
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        log.info("stopping", signal=number.name, at_once=stop.is_set())
        (hurry if stop.is_set() else stop).set()
        driver.wake()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    try:
        await controller.run(settings.look_interval, stop)
    finally:
        await driver.stop(settings.stop_grace, hurry)
        controller.save()


def _serve_metrics(address: str, registry: CollectorRegistry) -> None:
    host, port = split_address(address)
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        sys.exit(
            f"moebius-controller: cannot serve metrics on {address} ({error.strerror}): "
            "choose another with --metrics-listen"
        )


def _load(settings: ControllerSettings) -> ControllerState | None:
    try:
        return load_state(settings.stack.with_name(STATE_FILE))
    except StateFileError as error:
        log.warning("starting without a history", error=str(error))
        return None
