"""The engine's one loop: receive, schedule, compute, sample, send."""

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
import torch
from moebius_proto.worker.v1 import engine_pb2, worker_pb2

from moebius_worker.engine.convert import delta_from, failure, request_from
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.pipe import Pipe
from moebius_worker.engine.sampler import Sampled, SampleRow
from moebius_worker.engine.scheduler import Rejected, Scheduler
from moebius_worker.engine.types import Slice, StepPlan

HEARTBEAT_SECONDS = 1.0
# So many steps that raise, one after another, are no matter of the requests in them.
MAX_RAISES = 3

_REASONS = {
    "OVERLOADED": worker_pb2.REASON_OVERLOADED,
    "KV_EXHAUSTED": worker_pb2.REASON_KV_EXHAUSTED,
    "BAD_REQUEST": worker_pb2.REASON_BAD_REQUEST,
}

log = structlog.get_logger(__name__)


class EngineDownError(Exception):
    """The engine cannot go on, but a new one may."""

    def __init__(self, reason: worker_pb2.Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Runner(Protocol):
    """What the loop needs of a ModelRunner."""

    def step(self, slices: Sequence[Slice]) -> torch.Tensor:
        """Logits, fp32 [slices that sample, vocab], in the order of the slices."""


class EngineLoop:
    def __init__(
        self,
        pipe: Pipe,
        runner: Runner,
        scheduler: Scheduler,
        sample: Callable[[torch.Tensor, Sequence[SampleRow]], list[Sampled]],
        *,
        max_running: int,
        faults: FaultInjector,
    ) -> None:
        self._pipe = pipe
        self._runner = runner
        self._scheduler = scheduler
        self._sample = sample
        self._max_running = max_running
        self._faults = faults
        # The handles of the last StepBegin.
        self._announced: frozenset[int] = frozenset()
        # Of requests that were refused since the last StepEnd.
        self._refusals: list[worker_pb2.Failure] = []
        self._raises = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    def run(self) -> None:
        """Serves for ever. Raises FrontGoneError, FrameError or EngineDownError."""
        busy = False
        while True:
            for frame in self._pipe.receive(0 if busy else HEARTBEAT_SECONDS):
                self._take(frame)
            plan = self._scheduler.schedule()
            busy = bool(plan.slices)
            if busy:
                self._step(plan)
            else:
                self._send_end()

    def stats(self) -> engine_pb2.EngineStats:
        stats = self._scheduler.stats()
        return engine_pb2.EngineStats(
            step=self._steps,
            running=stats.running,
            waiting=stats.waiting,
            max_running=self._max_running,
            kv_pages_used=stats.cache.pages_used,
            kv_pages_cached=stats.cache.pages_cached,
            kv_pages_total=stats.cache.pages_total,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=stats.cached_tokens,
            preemptions=stats.preemptions,
        )

    def _take(self, frame: engine_pb2.FrontFrame) -> None:
        if frame.WhichOneof("frame") == "cancel":
            # False: it finished meanwhile.
            self._scheduler.cancel(frame.cancel.handle)
            return
        request = request_from(frame.submit)
        try:
            self._scheduler.add(request)
        except Rejected as rejected:
            reason = _REASONS[rejected.reason]
            retryable = reason == worker_pb2.REASON_OVERLOADED
            self._refusals.append(failure(request.handle, reason, rejected.message, retryable=retryable))
        else:
            self._prompt_tokens += len(request.token_ids)

    def _step(self, plan: StepPlan) -> None:
        handles = frozenset(plan.handles)
        if handles != self._announced:
            self._pipe.send(engine_pb2.EngineFrame(begin=engine_pb2.StepBegin(handles=plan.handles)))
            self._announced = handles
        self._steps += 1
        try:
            sampled = self._compute(plan)
        except torch.AcceleratorError as error:
            # Every later call on this device would fail too: only a new process gets a new context.
            raise EngineDownError(worker_pb2.REASON_GPU_FAULT, f"the device reported: {error}") from error
        except Exception as error:
            self._fail(plan, error)
            return
        self._raises = 0
        token_ids = {handle: (one.token_id,) for handle, one in sampled.items()}
        outputs = self._scheduler.complete(plan, token_ids)
        self._generated_tokens += sum(len(output.token_ids) for output in outputs)
        self._send_end(deltas=[delta_from(output, sampled[output.handle].logprobs) for output in outputs])

    def _compute(self, plan: StepPlan) -> dict[int, Sampled]:
        self._faults.check(plan.slices)
        logits = self._runner.step(plan.slices)
        handles = [piece.handle for piece in plan.slices if piece.sample]
        if not handles:
            return {}
        rows = [self._row(handle) for handle in handles]
        return dict(zip(handles, self._sample(logits, rows), strict=True))

    def _row(self, handle: int) -> SampleRow:
        history = self._scheduler.history(handle)
        request = history.request
        barred = len(history.output_ids) < request.min_tokens
        return SampleRow(
            params=request.sampling,
            prompt_ids=history.prompt_ids,
            output_ids=history.output_ids,
            banned=request.stop_token_ids if barred else frozenset(),
        )

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Gives up what was in the step, and nothing else."""
        log.exception("step raised", step=self._steps, requests=len(plan.slices))
        message = f"the engine's step raised {type(error).__name__}: {error}"
        self._raises += 1
        if self._raises == MAX_RAISES:
            raise EngineDownError(
                worker_pb2.REASON_ENGINE_DEAD, f"{MAX_RAISES} steps in a row raised; of the last: {message}"
            ) from error
        self._scheduler.fail(plan.handles)
        self._send_end(
            failures=[
                failure(handle, worker_pb2.REASON_ENGINE_DEAD, message, retryable=True, in_step=True)
                for handle in plan.handles
            ]
        )

    def _send_end(
        self,
        deltas: Sequence[worker_pb2.Delta] = (),
        failures: Sequence[worker_pb2.Failure] = (),
    ) -> None:
        end = engine_pb2.StepEnd(deltas=deltas, failures=[*self._refusals, *failures], stats=self.stats())
        self._refusals.clear()
        self._pipe.send(engine_pb2.EngineFrame(end=end))
