"""The simulated engine: the engine's loop over a simulated model."""

import os
import signal
import time

from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.convert import loading
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.grammar.compiler import GrammarCompiler, grammar_tokenizer
from moebius_worker.engine.grammar.grammars import Grammars
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.loop import EngineLoop
from moebius_worker.engine.pipe import Pipe
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.settings import WorkerSettings
from moebius_worker.sim.arrivals import DelayedPipe
from moebius_worker.sim.model import Ends, SimModel
from moebius_worker.sim.vocabulary import vocabulary

ARCHITECTURE = "Simulated"
_STEP_TOKENS = 4096
_CONTEXT = 32_768
_PROGRESS_SECONDS = 0.5


class ProcessEnds:
    """Of an engine that is a process, and its parent the front."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stall(self) -> None:
        stall(self._pipe)

    def reset(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        stall(self._pipe)


def stall(pipe: Pipe) -> None:
    """Says nothing any more, until FrontGoneError."""
    while True:
        pipe.receive(3600)


def run_simulation(pipe: Pipe, settings: WorkerSettings, ends: Ends) -> None:
    """Serves for ever. Raises what EngineLoop.run raises, and CheckpointError."""
    _start_slowly(pipe, settings.sim.start_seconds)
    words = vocabulary(settings.model)
    model = SimModel(settings.sim, words, ends)
    pages = settings.sim.kv_tokens // settings.page_size
    max_model_len = min(settings.max_model_len or words.context or _CONTEXT, settings.sim.kv_tokens)
    config = SchedulerConfig(
        CacheLayout(settings.page_size, pages),
        max_running=settings.max_running,
        max_step_tokens=settings.max_step_tokens or _STEP_TOKENS,
        max_model_len=max_model_len,
        max_waiting=settings.max_waiting,
    )
    compiler = GrammarCompiler(
        lambda: grammar_tokenizer(words.files["tokenizer.json"], words.size, words.eos_token_ids), pipe.wake
    )
    loop = EngineLoop(
        DelayedPipe(pipe, settings.sim),
        model,
        Scheduler(config),
        model.sample,
        Grammars(compiler),
        max_running=settings.max_running,
        eos_token_ids=words.eos_token_ids,
        faults=FaultInjector(settings.inject_faults),
    )
    described = worker_pb2.Model(
        architecture=ARCHITECTURE,
        max_model_len=max_model_len,
        vocab_size=words.size,
        eos_token_ids=words.eos_token_ids,
        dtype="none",
        device="none",
        page_size=settings.page_size,
    )
    pipe.send(engine_pb2.EngineFrame(ready=engine_pb2.EngineReady(model=described, stats=loop.stats())))
    loop.run()


def _start_slowly(pipe: Pipe, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        pipe.send(loading("pretending to load", round(1000 * (seconds - left)), round(1000 * seconds)))
        time.sleep(min(left, _PROGRESS_SECONDS))
