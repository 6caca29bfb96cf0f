"""From a checkpoint to an engine that serves. Imports PyTorch, which takes seconds: import this late."""

import threading
from functools import partial

import structlog
import torch

from moebius_common.garbage import spare_what_is_there
from moebius_kernels.jit.triton_cache import hash_compiler
from moebius_kernels.kv_pages import KvFormat
from moebius_kernels.launch import LaunchError
from moebius_kernels.registry import gather
from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.tokenizer import tokenizer_files
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.grammar.compiler import GrammarCompiler, grammar_tokenizer
from moebius_worker.engine.grammar.grammars import Grammars
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.loop import EngineLoop
from moebius_worker.engine.phases import Phases
from moebius_worker.engine.pipe import Pipe
from moebius_worker.engine.probation import Probation
from moebius_worker.engine.run_ahead import RunAhead
from moebius_worker.engine.runner import PlannedModel, RunnerOptions
from moebius_worker.engine.sampler import choose, sample
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.preflight.examine import Wanted
from moebius_worker.preflight.measure import make_runner, refusing_plainly
from moebius_worker.preflight.prepare import prepare, references_alone
from moebius_worker.preflight.process import Waiting
from moebius_worker.preflight.run import Progress
from moebius_worker.settings import WorkerSettings

# After one of these no other step is computed in this process. PyTorch says of the device that it failed; our
# door for launches says so too, or that it refuses a kernel.
DEVICE_ERRORS = (torch.AcceleratorError, LaunchError)

log = structlog.get_logger(__name__)


def preload() -> None:
    """What all engines do, besides importing this, before they look at their model. Nothing here may touch a
    GPU: a process that stands by holds none of its memory."""
    gather()
    hash_compiler()


def load_and_serve(
    checkpoint: Checkpoint,
    settings: WorkerSettings,
    pipe: Pipe,
    flights: int,
    progress: Progress,
    phases: Phases,
    waiting: Waiting,
) -> None:
    """Serves for ever. `flights`: the open file of the flight recorder. `phases`: what `progress` is told.
    `waiting`: processes of the preflight that were started before.

    Raises FrontGoneError, CheckpointError, OutOfMemoryPlan, EngineDownError, PreflightError.
    """
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
    progress("planning the memory", 0, 0)
    # The memory is measured before others take some of it for a while.
    planned = PlannedModel.of(checkpoint, options, estimated=False)

    def read_weights() -> None:
        """While kernels are compiled, unless they take the memory that the preflight needs."""
        if planned.leaves_room:
            planned.read(progress)

    probation = Probation(settings.probation) if settings.probation else None
    if settings.kernels == "reference":
        kernels = references_alone(settings.exclude_backends)
    else:
        with refusing_plainly(planned):
            kernels = prepare(
                checkpoint,
                Wanted(options, excluded=settings.exclude_backends),
                flights,
                lambda phase, done, total: progress(phase, 0, 0),
                read_weights,
                waiting,
                probation,
            )
    for process in waiting.values():
        process.end()
    runner = make_runner(planned, kernels, progress, graphs=settings.cuda_graphs)
    if probation is not None:
        # Only now: the memory of graphs has been measured with them.
        runner.eager = probation.lasts
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
        device_errors=DEVICE_ERRORS,
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
    log.info("the start took", seconds=phases.seconds())
    pipe.send(engine_pb2.EngineFrame(ready=engine_pb2.EngineReady(model=model, stats=loop.stats())))
    spare_what_is_there()
    if probation is not None:
        probation.serve()
    loop.run()


def dummy_form(load_format: str) -> str | None:
    """The form of random weights, None for the checkpoint's."""
    kind, _, form = load_format.partition(":")
    return (form or "bf16") if kind == "dummy" else None
