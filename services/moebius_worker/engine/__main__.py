"""`python -m moebius_worker.engine --fd N SETTINGS`: started by the front, never by hand."""

import argparse
import os
import signal
import socket
import sys
import threading
import time
from functools import partial

import structlog

from moebius_common.garbage import spare_what_is_there
from moebius_common.logs import configure_logs
from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from moebius_worker.checkpoint.tokenizer import tokenizer_files
from moebius_worker.engine.convert import fatal, loading
from moebius_worker.engine.errors import EngineDownError
from moebius_worker.engine.memory import OutOfMemoryPlan
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
    try:
        return _serve(pipe, settings, arguments.flights)
    except FrontGoneError:
        log.info("the front is gone; ending")
        return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="moebius_worker.engine", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the engine's end of the socket pair")
    parser.add_argument("--flights", type=int, required=True, help="the file of the flight recorder")
    parser.add_argument("settings", help="WorkerSettings as JSON")
    return parser.parse_args()


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

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        # A model has tens of thousands of tensors: nobody reads so fast.
        if done in (0, total) or phase != last[0] or now >= last[1] + _PROGRESS_SECONDS:
            last = phase, now
            pipe.send(loading(phase, done, total))

    if settings.engine == "sim":
        run_simulation(pipe, settings, ProcessEnds(pipe))
        return
    progress("opening the checkpoint", 0, 0)
    checkpoint = open_checkpoint(settings.model, progress=progress)
    progress("starting PyTorch", 0, 0)
    waiting = {} if settings.kernels == "reference" else start_early(settings.device)
    # Late, so that a checkpoint that is not there is reported at once.
    import torch

    from moebius_kernels.jit.triton_cache import hash_compiler
    from moebius_kernels.kv_pages import KvFormat
    from moebius_worker.engine.faults import FaultInjector
    from moebius_worker.engine.grammar.compiler import GrammarCompiler, grammar_tokenizer
    from moebius_worker.engine.grammar.grammars import Grammars
    from moebius_worker.engine.loop import EngineLoop
    from moebius_worker.engine.run_ahead import RunAhead
    from moebius_worker.engine.runner import ModelRunner, PlannedModel, RunnerOptions
    from moebius_worker.engine.sampler import choose, sample
    from moebius_worker.engine.scheduler import Scheduler, SchedulerConfig
    from moebius_worker.preflight.examine import Wanted
    from moebius_worker.preflight.prepare import prepare, references_alone

    options = RunnerOptions(
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_bytes=settings.kv_cache_memory,
        page_size=settings.page_size,
        max_model_len=settings.max_model_len,
        threads=settings.threads,
        max_step_tokens=settings.max_step_tokens,
        max_running=settings.max_running,
        kv_format=KvFormat(settings.kv_cache_dtype),
        expand_weights={"auto": None, "yes": True, "no": False}[settings.expand_weights],
        dummy_weights=dummy_form(settings.load_format),
    )
    if torch.cuda.is_available():
        threading.Thread(target=hash_compiler, daemon=True).start()
    # The memory is measured before others take some of it for a while.
    planned = PlannedModel.of(checkpoint, options)

    def read_weights() -> None:
        """While kernels are compiled, unless they take the memory that the preflight needs."""
        if planned.leaves_room:
            planned.read(progress)

    if settings.kernels == "reference":
        kernels = references_alone(settings.exclude_backends)
    else:
        kernels = prepare(
            checkpoint,
            Wanted(options, excluded=settings.exclude_backends),
            flights,
            lambda phase, done, total: progress(phase, 0, 0),
            read_weights,
            waiting,
        )
    for process in waiting.values():
        process.end()
    runner = ModelRunner.of(planned, progress)
    runner.bind(kernels.operations)
    if kernels.plan.choices:
        if settings.cuda_graphs:
            runner.capture(kernels.plan.capturable, progress)
        kernels.warm_up(runner, lambda phase, done, total: progress(phase, 0, 0))
    config = SchedulerConfig(
        runner.layout,
        max_running=settings.max_running,
        max_step_tokens=runner.max_step_tokens,
        max_model_len=runner.max_model_len,
        max_waiting=settings.max_waiting,
    )
    eos_token_ids = checkpoint.eos_token_ids
    draw_tokens = kernels.operations.draw_tokens
    compiler = GrammarCompiler(
        lambda: grammar_tokenizer(
            tokenizer_files(checkpoint)["tokenizer.json"], runner.vocab_size, eos_token_ids
        ),
        pipe.wake,
    )
    loop = EngineLoop(
        pipe,
        runner,
        Scheduler(config),
        partial(sample, draw_tokens=draw_tokens),
        Grammars(compiler),
        max_running=config.places,
        eos_token_ids=eos_token_ids,
        faults=FaultInjector(settings.inject_faults),
        device_errors=(torch.AcceleratorError,),
        late_compilations=lambda: kernels.late_compilations,
        expert_use=runner.expert_use,
        # A fault strikes before a step with its token is computed: tokens must be known.
        ahead=None
        if settings.inject_faults
        else RunAhead(runner, runner.captured, partial(choose, draw_tokens=draw_tokens)),
    )
    model = worker_pb2.Model(
        architecture=runner.architecture,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        eos_token_ids=eos_token_ids,
        dtype=runner.dtype_name,
        device=runner.device_name,
        page_size=runner.layout.page_size,
        plan=kernels.message(),
    )
    kernels.freeze()
    pipe.send(engine_pb2.EngineFrame(ready=engine_pb2.EngineReady(model=model, stats=loop.stats())))
    spare_what_is_there()
    loop.run()


def dummy_form(load_format: str) -> str | None:
    """The form of random weights, None for the checkpoint's."""
    kind, _, form = load_format.partition(":")
    return (form or "bf16") if kind == "dummy" else None


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
