"""`moebius-worker`: reads the settings and runs the front."""

import asyncio
import sys
from collections.abc import Sequence

import structlog
from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from moebius_worker.front.server import ListenError, serve
from moebius_worker.logs import configure_logs
from moebius_worker.settings import WorkerSettings


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until SIGTERM or SIGINT. Exit status: 1 if it cannot listen, 2 if the settings are wrong."""
    settings = _read_settings(sys.argv[1:] if arguments is None else arguments)
    configure_logs(settings.log_format, process="front")
    log = structlog.get_logger(__name__)
    log.info("settings", **settings.model_dump(mode="json"))
    try:
        asyncio.run(serve(settings))
    except ListenError as error:
        sys.exit(f"moebius-worker: {error}")


def _read_settings(arguments: Sequence[str]) -> WorkerSettings:
    try:
        return CliApp.run(WorkerSettings, cli_args=list(arguments))
    except ValidationError as error:
        lines = [_explain(problem["loc"], problem["msg"]) for problem in error.errors()]
    except (SettingsError, ValueError) as error:
        lines = [str(error)]
    # What is wrong comes last, since the last line is what a supervisor quotes.
    sys.stderr.write("moebius-worker: these settings are wrong; --help explains them\n")
    for line in lines:
        sys.stderr.write(f"moebius-worker: {line}\n")
    sys.exit(2)


def _explain(location: tuple[int | str, ...], message: str) -> str:
    flag = "--" + ".".join(map(str, location)).replace("_", "-")
    return f"{flag}: {message.removeprefix('Value error, ')}"
