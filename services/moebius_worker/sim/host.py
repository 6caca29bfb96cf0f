"""Many simulated workers in one process, each on a port of its own: for load tests of gateways."""

import asyncio
import sys
import threading
from collections.abc import Sequence
from functools import partial

import structlog
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from moebius_common.address import split_address
from moebius_common.logs import configure_logs
from moebius_common.settings import read_settings
from moebius_worker.front.server import ListenError, Stop, serve
from moebius_worker.settings import WorkerSettings
from moebius_worker.sim.thread import start_thread

# Of an engine's thread: a thousand of them should not reserve gigabytes.
_STACK_BYTES = 512 * 1024
# How long a thread waits before it asks for its turn, in seconds: where a thousand of them wait and ask as
# often as is usual, no time is left for work.
_SWITCH_INTERVAL = 0.1

log = structlog.get_logger(__name__)


class HostSettings(WorkerSettings):
    """Hosts simulated workers on consecutive ports, from that of --listen on; all are alike."""

    model_config = SettingsConfigDict(env_prefix="MOEBIUS_SIM_", cli_prog_name="moebius sim")

    workers: int = Field(1, gt=0, description="How many workers.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT. Exit status: 1 if it cannot listen, 2 if the settings are wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    settings = read_settings(HostSettings, ["--engine", "sim", *words])
    configure_logs(settings.log_format, process="sim")
    threading.stack_size(_STACK_BYTES)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        asyncio.run(_main(settings))
    except* ListenError as errors:
        sys.exit(f"moebius sim: {errors.exceptions[0]}")


def addresses(settings: HostSettings) -> list[str]:
    host, first = split_address(settings.listen)
    shown = f"[{host}]" if ":" in host else host
    return [f"{shown}:{first + number}" for number in range(settings.workers)]


async def _main(settings: HostSettings) -> None:
    stop = Stop()
    stop.on_signals()
    await host(settings, stop)


async def host(settings: HostSettings, stop: Stop) -> None:
    """Until it is asked to stop. Raises ListenError, in a group, when a port is taken."""
    async with asyncio.TaskGroup() as group:
        for address in addresses(settings):
            # Engines are threads here: no process becomes one.
            own = {"listen": address, "standby": "no"}
            alone = WorkerSettings.model_construct(**(dict(settings) | own))
            group.create_task(_keep(alone, stop))


async def _keep(settings: WorkerSettings, stop: Stop) -> None:
    """One worker, started again whenever it was reset."""
    loop = asyncio.get_running_loop()
    while True:

        def reset() -> None:
            loop.call_soon_threadsafe(serving.cancel)  # noqa: B023 (it is the one of this turn)

        serving = asyncio.create_task(serve(settings, stop, partial(start_thread, reset=reset)))
        try:
            return await serving
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        await asyncio.sleep(settings.restart_delay)
