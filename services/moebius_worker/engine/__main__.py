"""`python -m moebius_worker.engine --fd N SETTINGS`: started by the front, never by hand."""

import argparse
import os
import signal
import socket
import sys
import time

import structlog

from moebius_common.garbage import collect_nothing_yet
from moebius_common.logs import configure_logs
from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from moebius_worker.engine.convert import fatal, loading
from moebius_worker.engine.errors import EngineDownError
from moebius_worker.engine.gpu_context import wake_gpu
from moebius_worker.engine.memory import OutOfMemoryPlan
from moebius_worker.engine.phases import Phases
from moebius_worker.engine.pipe import FrontGoneError, Pipe
from moebius_worker.preflight.process import start_early
from moebius_worker.settings import WorkerSettings
from moebius_worker.sim.engine import ProcessEnds, run_simulation

# How often the front hears of a phase that goes on.
_PROGRESS_SECONDS = 0.05

log = structlog.get_logger(__name__)


def main() -> int:
    arguments = _parse()
    settings = WorkerSettings.model_validate_json(arguments.settings)
    # Ctrl-C, which the whole process group gets, is for the front, which drains and then ends the engine.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logs(settings.log_format, process="engine", pid=os.getpid())
    connection = socket.socket(fileno=arguments.fd)
    connection.set_inheritable(False)
    pipe = Pipe(connection)
    if arguments.standby:
        given = _stand_by(settings)
        if given is None:
            return 0
        settings = given
    try:
        return _serve(pipe, settings, arguments.flights)
    except FrontGoneError:
        log.info("the front is gone; ending")
        return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="moebius_worker.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the engine's end of the socket pair")
    parser.add_argument("--flights", type=int, required=True, help="the file of the flight recorder")
    parser.add_argument("--standby", action="store_true", help="wait for a line with other settings on stdin")
    parser.add_argument("settings", help="WorkerSettings as JSON")
    return parser.parse_args()


def _stand_by(settings: WorkerSettings) -> WorkerSettings | None:
    """Imports what an engine of such settings needs, and waits for those that it is to have. None: the front
    is gone, or wants no engine any more."""
    if settings.engine == "model":
        collect_nothing_yet()
        from moebius_worker.engine.serving import preload

        preload()
    log.info("standing by")
    line = sys.stdin.buffer.readline()
    return WorkerSettings.model_validate_json(line) if line else None


def _serve(pipe: Pipe, settings: WorkerSettings, flights: int) -> int:
    """Loads and serves. Says why in a last frame when it cannot; raises FrontGoneError."""
    try:
        _load_and_run(pipe, settings, flights)
    except FrontGoneError:
        raise
    except Exception as error:
        for_users = isinstance(error, CheckpointError | OutOfMemoryPlan)
        log.error("the engine ends", message=str(error), exc_info=not for_users)
        pipe.send(last_word(error))
    return 1


def _load_and_run(pipe: Pipe, settings: WorkerSettings, flights: int) -> None:
    last = ("", 0.0)
    phases = Phases()

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal last
        phases.begin(phase)
        now = time.monotonic()
        # A model has tens of thousands of tensors: nobody reads so fast.
        if done in (0, total) or phase != last[0] or now >= last[1] + _PROGRESS_SECONDS:
            last = phase, now
            pipe.send(loading(phase, done, total))

    if settings.engine == "sim":
        run_simulation(pipe, settings, ProcessEnds(pipe))
        return
    collect_nothing_yet()
    progress("opening the checkpoint", 0, 0)
    checkpoint = open_checkpoint(settings.model, progress=progress)
    progress("starting PyTorch", 0, 0)
    wake_gpu(settings.device)
    waiting = {} if settings.kernels == "reference" else start_early(settings.device)
    # Late, so that a checkpoint that is not there is reported at once.
    from moebius_worker.engine.serving import load_and_serve

    load_and_serve(checkpoint, settings, pipe, flights, progress, phases, waiting)


def last_word(error: Exception) -> engine_pb2.EngineFrame:
    """Why the engine ends. Permanent is what the next one would find just the same."""
    match error:
        case CheckpointError():
            return fatal(worker_pb2.REASON_ENGINE_DEAD, str(error), permanent=True)
        case OutOfMemoryPlan():
            return fatal(worker_pb2.REASON_ENGINE_DEAD, str(error), permanent=error.permanent)
        case EngineDownError():
            return fatal(error.reason, str(error), permanent=False)
        case _:
            message = f"the engine raised {type(error).__name__}: {error}"
            return fatal(worker_pb2.REASON_ENGINE_DEAD, message, permanent=False)


if __name__ == "__main__":
    sys.exit(main())
