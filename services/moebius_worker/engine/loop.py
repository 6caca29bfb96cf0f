"""The engine's one loop: receive, schedule, compute, sample, send."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import structlog
import torch

from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.engine.convert import delta_from, request_from
from moebius_worker.engine.errors import EngineDownError
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.pipe import FrontGoneError, Pipe
from moebius_worker.engine.runner import Computed
from moebius_worker.engine.sampler import NonFiniteLogitsError, Sampled, SampleRow
from moebius_worker.engine.scheduler import Rejected, Scheduler
from moebius_worker.engine.types import Slice, StepPlan

HEARTBEAT_SECONDS = 1.0
# When so many steps have raised, one after another, it is the engine: a request that raises each time is
# given up by its gateway before that.
MAX_RAISES = 8
# How long a gateway had better wait when the queue is full.
RETRY_AFTER_MS = 1000

_REASONS = {
    "OVERLOADED": worker_pb2.REASON_OVERLOADED,
    "KV_EXHAUSTED": worker_pb2.REASON_KV_EXHAUSTED,
    "BAD_REQUEST": worker_pb2.REASON_BAD_REQUEST,
    # It waited in vain: that is what an overload is.
    "DEADLINE": worker_pb2.REASON_OVERLOADED,
}

log = structlog.get_logger(__name__)


class Runner(Protocol):
    """What the loop needs of a ModelRunner."""

    def step(self, slices: Sequence[Slice], progress: Callable[[], None]) -> Computed:
        """Calls `progress` as it advances."""


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
        # Of requests that were not taken since the last StepEnd.
        self._refusals: list[worker_pb2.Failure] = []
        # When the last StepEnd was sent, by time.monotonic().
        self._last_end = time.monotonic()
        # Steps that raised since the last one that did not.
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
            plan = self._scheduler.schedule(time.monotonic())
            self._refusals += [_refused(handle, rejected) for handle, rejected in plan.refused]
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
        handle = frame.submit.handle
        try:
            self._scheduler.add(request_from(frame.submit, time.monotonic()))
        except Rejected as rejected:
            self._refusals.append(_refused(handle, rejected))
        except Exception as error:
            # In no step, but guilty all the same: it must not come back for ever.
            log.exception("request not taken", request_id=frame.submit.request_id)
            message = f"taking the request raised {type(error).__name__}: {error}"
            self._refusals.append(_failed(handle, message))
        else:
            self._prompt_tokens += len(frame.submit.token_ids)

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
        except FrontGoneError:
            raise
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
        """What was sampled, by handle, and the failures of requests that cannot go on."""
        self._faults.check(plan.slices)
        logits, faulty = self._runner.step(plan.slices, self._progress)
        failures = [_failed(handle, "its hidden states are not finite") for handle in faulty]
        sampling = [piece.handle for piece in plan.slices if piece.sample]
        rows = {row: handle for row, handle in enumerate(sampling) if handle not in faulty}
        try:
            return self._draw(logits, rows), failures
        except NonFiniteLogitsError as error:
            bad = [list(rows)[index] for index in error.rows]
            failures += [_failed(rows.pop(row), "its logits are not finite") for row in bad]
            return self._draw(logits, rows), failures

    def _draw(self, logits: torch.Tensor, rows: Mapping[int, int]) -> dict[int, Sampled]:
        """By handle. `rows`: handles by their rows of the logits; no others are sampled."""
        chosen = logits if len(rows) == len(logits) else logits[list(rows)]
        sampled = self._sample(chosen, [self._row(handle) for handle in rows.values()])
        return dict(zip(rows.values(), sampled, strict=True))

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
        if self._raises >= MAX_RAISES:
            raise EngineDownError(
                worker_pb2.REASON_ENGINE_DEAD, f"{self._raises} steps in a row raised; of the last: {message}"
            ) from error
        self._scheduler.fail(plan.handles)
        self._send_end(failures=[_failed(handle, message) for handle in plan.handles])

    def _progress(self) -> None:
        """Keeps a step that takes long from being taken for a stall. The frame brings nothing."""
        if time.monotonic() - self._last_end >= HEARTBEAT_SECONDS:
            self._send_end()

    def _send_end(
        self,
        deltas: Sequence[worker_pb2.Delta] = (),
        failures: Sequence[worker_pb2.Failure] = (),
    ) -> None:
        end = engine_pb2.StepEnd(deltas=deltas, failures=[*self._refusals, *failures], stats=self.stats())
        self._refusals.clear()
        self._pipe.send(engine_pb2.EngineFrame(end=end))
        self._last_end = time.monotonic()


def _refused(handle: int, rejected: Rejected) -> worker_pb2.Failure:
    error = worker_pb2.Error(reason=_REASONS[rejected.reason], message=rejected.message)
    if error.reason == worker_pb2.REASON_OVERLOADED:
        error.retryable, error.retry_after_ms = True, RETRY_AFTER_MS
    return worker_pb2.Failure(handle=handle, error=error)


def _failed(handle: int, message: str) -> worker_pb2.Failure:
    """Of a request that is to blame, or may be: a strike against it."""
    error = worker_pb2.Error(
        reason=worker_pb2.REASON_ENGINE_DEAD, message=message, retryable=True, in_step=True
    )
    return worker_pb2.Failure(handle=handle, error=error)
