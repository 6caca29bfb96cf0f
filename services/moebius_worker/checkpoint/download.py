"""`python -m moebius_worker.checkpoint.download MODEL`: fetches a model before its worker starts.

It says how far it is, and tries again, since a hub that is busy or out of reach comes back; a pod that failed
would start its download anew.
"""

import sys
import time
from collections.abc import Callable, Sequence

import structlog

from moebius_common.backoff import backoff
from moebius_common.logs import configure_logs
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.locate import Located, Progress, locate

# Seconds between two lines about progress, and between tries.
REPORT_SECONDS = 5.0
FIRST_PAUSE = 5.0
LONGEST_PAUSE = 300.0

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit status: 1 if the model cannot be had."""
    (model,) = sys.argv[1:] if arguments is None else arguments
    configure_logs("json", process="download")
    try:
        located = fetch(model, report(time.monotonic), time.sleep)
    except CheckpointError as error:
        sys.exit(f"download: {error}")
    log.info("there", model=model, path=str(located.path))


def report(clock: Callable[[], float]) -> Progress:
    """Logs progress every few seconds."""
    last = clock() - REPORT_SECONDS

    def progress(what: str, done: int, total: int) -> None:
        nonlocal last
        if clock() - last >= REPORT_SECONDS or (total and done >= total):
            last = clock()
            percent = round(100 * done / total, 1) if total else None
            log.info(what, bytes=done, of=total, percent=percent)

    return progress


def fetch(model: str, progress: Progress, sleep: Callable[[float], None], tries: int = 8) -> Located:
    """Tries again after failures, with pauses that grow. Raises CheckpointError after the last."""
    for failures in range(tries - 1):
        try:
            return locate(model, progress=progress)
        except CheckpointError as error:
            pause = backoff(FIRST_PAUSE, failures, LONGEST_PAUSE)
            log.warning("failed", error=str(error), again_in=pause)
            sleep(pause)
    return locate(model, progress=progress)


if __name__ == "__main__":
    main()
