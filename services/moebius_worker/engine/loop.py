"""The engine's one loop: receive, schedule, compute, sample, send."""

from collections.abc import Callable, Sequence
from typing import Protocol

import structlog
import torch

from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.engine.convert import delta_from, request_from
from moebius_worker.engine.errors import EngineDownError
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.pipe import Pipe
from moebius_worker.engine.sampler import NonFiniteLogitsError, Sampled, SampleRow
from moebius_worker.engine.scheduler import Rejected, Scheduler
from moebius_worker.engine.types import Slice, StepPlan

HEARTBEAT_SECONDS = 1.0
# When so many steps have raised, one after another, and no request was in all of them, it is the engine.
MAX_RAISES = 3
# How long a gateway had better wait when the queue is full.
RETRY_AFTER_MS = 1000

_REASONS = {
    "OVERLOADED": worker_pb2.REASON_OVERLOADED,
    "KV_EXHAUSTED": worker_pb2.REASON_KV_EXHAUSTED,
    "BAD_REQUEST": worker_pb2.REASON_BAD_REQUEST,
}

log = structlog.get_logger(__name__)


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
        # Steps that raised since the last one that did not, and the requests that were in all of them.
        self._raises = 0
        self._in_all_raises: frozenset[str] = frozenset()
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
            self._refusals.append(_refused(request.handle, rejected))
        else:
            self._prompt_tokens += len(request.token_ids)

    def _step(self, plan: StepPlan) -> None:
        handles = frozenset(plan.handles)
        if handles != self._announced:
            self._pipe.send(engine_pb2.EngineFrame(begin=engine_pb2.StepBegin(handles=plan.handles)))
            self._announced = handles
        self._steps += 1
        try:
            sampled, failures = self._compute(plan)
        except torch.AcceleratorError as error:
            # Every later call on this device would fail too: only a new process gets a new context.
            raise EngineDownError(worker_pb2.REASON_GPU_FAULT, f"the device reported: {error}") from error
        except Exception as error:
            self._fail(plan, error)
            return
        self._raises = 0
        self._scheduler.fail(failed.handle for failed in failures)
        outputs = self._scheduler.complete(plan, {handle: (one.token_id,) for handle, one in sampled.items()})
        self._generated_tokens += sum(len(output.token_ids) for output in outputs)
        deltas = [delta_from(output, sampled[output.handle].logprobs) for output in outputs]
        self._send_end(deltas, failures)

    def _compute(self, plan: StepPlan) -> tuple[dict[int, Sampled], list[worker_pb2.Failure]]:
        """What was sampled, by handle, and the failures of requests for which nothing could be."""
        self._faults.check(plan.slices)
        logits = self._runner.step(plan.slices)
        handles = [piece.handle for piece in plan.slices if piece.sample]
        rows = [self._row(handle) for handle in handles]
        try:
            return dict(zip(handles, self._sample(logits, rows), strict=True)), []
        except NonFiniteLogitsError as error:
            good = [row for row in range(len(rows)) if row not in error.rows]
            sampled = self._sample(logits[good], [rows[row] for row in good])
            failures = [_failed(handles[row], "its logits are not finite") for row in error.rows]
            return dict(zip([handles[row] for row in good], sampled, strict=True)), failures

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
        # By the names that stay when a gateway submits them again.
        requests = frozenset(self._scheduler.history(handle).request.request_id for handle in plan.handles)
        self._in_all_raises = self._in_all_raises & requests if self._raises else requests
        self._raises += 1
        if self._raises >= MAX_RAISES and not self._in_all_raises:
            raise EngineDownError(
                worker_pb2.REASON_ENGINE_DEAD, f"{self._raises} steps in a row raised; of the last: {message}"
            ) from error
        self._scheduler.fail(plan.handles)
        self._send_end(failures=[_failed(handle, message) for handle in plan.handles])

    def _send_end(
        self,
        deltas: Sequence[worker_pb2.Delta] = (),
        failures: Sequence[worker_pb2.Failure] = (),
    ) -> None:
        end = engine_pb2.StepEnd(deltas=deltas, failures=[*self._refusals, *failures], stats=self.stats())
        self._refusals.clear()
        self._pipe.send(engine_pb2.EngineFrame(end=end))


def _refused(handle: int, rejected: Rejected) -> worker_pb2.Failure:
    error = worker_pb2.Error(reason=_REASONS[rejected.reason], message=rejected.message)
    if error.reason == worker_pb2.REASON_OVERLOADED:
        error.retryable, error.retry_after_ms = True, RETRY_AFTER_MS
    return worker_pb2.Failure(handle=handle, error=error)


def _failed(handle: int, message: str) -> worker_pb2.Failure:
    """Of a request that was in the step."""
    error = worker_pb2.Error(
        reason=worker_pb2.REASON_ENGINE_DEAD, message=message, retryable=True, in_step=True
    )
    return worker_pb2.Failure(handle=handle, error=error)
