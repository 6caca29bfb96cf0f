"""`moebius-worker`: reads the settings and runs the front."""

import asyncio
import sys
from collections.abc import Sequence

import structlog

from moebius_common.logs import configure_logs
from moebius_common.settings import read_settings
from moebius_worker.front.server import ListenError, Stop, serve
from moebius_worker.settings import WorkerSettings


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT. Exit status: 1 if it cannot listen, 2 if the settings are wrong."""
    settings = read_settings(WorkerSettings, arguments)
    configure_logs(settings.log_format, process="front")
    log = structlog.get_logger(__name__)
    log.info("settings", **settings.model_dump(mode="json"))
    try:
        asyncio.run(_serve(settings))
    except ListenError as error:
        sys.exit(f"moebius-worker: {error}")


async def _serve(settings: WorkerSettings) -> None:
    stop = Stop()
    stop.on_signals()
    await serve(settings, stop)
