"""The engine's one loop: receive, schedule, compute, sample, send.

As a rule a step is computed, sampled and sent in one turn. Where the device computes by itself, and nothing
but the logits decides on the next tokens, a turn first launches the step after the one under way, with ids
that are still on the device; then it waits for the latter, and sends what came of it while the former is
computed.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import structlog

from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.engine.convert import delta_from, request_from
from moebius_worker.engine.errors import EngineDownError
from moebius_worker.engine.failures import failed, not_finite, refused
from moebius_worker.engine.faults import FaultInjector
from moebius_worker.engine.grammar.grammars import NO_MASKS, Grammars, Masks
from moebius_worker.engine.grammar.matcher import GrammarError
from moebius_worker.engine.pipe import FrontGoneError
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.types import (
    NonFiniteLogitsError,
    Rejected,
    Request,
    Sampled,
    SampleRow,
    Slice,
    StepPlan,
)

HEARTBEAT_SECONDS = 1.0
# When so many steps have raised, one after another, it is the engine: a request that raises each time is
# given up by its gateway before that.
MAX_RAISES = 8

log = structlog.get_logger(__name__)


# Rows of them, [slices that sample, vocab], in a form that runner and sampler agree on: a list of row numbers
# selects some.
Logits = Any


class Front(Protocol):
    """What the loop needs of a Pipe."""

    def send(self, frame: engine_pb2.EngineFrame) -> None: ...

    def receive(self, timeout: float) -> list[engine_pb2.FrontFrame]: ...


class Runner(Protocol):
    """What the loop needs of a ModelRunner."""

    def step(
        self, slices: Sequence[Slice], progress: Callable[[], None]
    ) -> tuple[Logits, Callable[[], frozenset[int]]]:
        """Logits, and what waits for the handles whose rows are not finite. Calls `progress` now and then."""


class Launched(Protocol):
    def collect(self) -> list[int]:
        """Waits for the token ids of its slices; -1 where logits are not finite."""


class Ahead(Protocol):
    """What the loop needs of a RunAhead."""

    def offers(self, slices: Sequence[Slice]) -> bool:
        """Whether a step of these can be launched, and then those of a part of their requests."""

    def launch(self, slices: Sequence[Slice], rows: Sequence[SampleRow], before: Any) -> Launched:
        """`before`: what came of launching the step that this one was planned ahead of, if it was."""


# What was sampled, by handle, and the failures of requests that cannot go on.
Found = tuple[dict[int, Sampled], list[worker_pb2.Failure]]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that is planned, and what is left to do of it."""

    plan: StepPlan
    # By time.monotonic().
    begun: float
    find: Callable[[], Found]
    # What the next step can be launched with; None: that has to wait.
    launched: Launched | None = None


class EngineLoop:
    def __init__(
        self,
        pipe: Front,
        runner: Runner,
        scheduler: Scheduler,
        sample: Callable[[Logits, Sequence[SampleRow]], list[Sampled]],
        grammars: Grammars,
        *,
        max_running: int,
        eos_token_ids: Collection[int],
        faults: FaultInjector,
        device_errors: tuple[type[Exception], ...] = (),
        late_compilations: Callable[[], int] = lambda: 0,
        expert_use: Callable[[], engine_pb2.ExpertUse | None] = lambda: None,
        ahead: Ahead | None = None,
    ) -> None:
        """`device_errors`: after one of these no step can succeed in this process. `late_compilations`: of
        kernels, since it serves. `expert_use`: what there is to tell since it was asked last. `ahead`: None
        if no step can be launched before the last one is complete."""
        self._pipe = pipe
        self._runner = runner
        self._scheduler = scheduler
        self._sample = sample
        self._grammars = grammars
        self._max_running = max_running
        self._eos_token_ids = frozenset(eos_token_ids)
        self._faults = faults
        self._device_errors = device_errors
        self._late_compilations = late_compilations
        self._expert_use = expert_use
        self._ahead = ahead
        # The step that was launched before the last one was complete.
        self._flight: Flight | None = None
        # The handles of the last StepBegin.
        self._announced: frozenset[int] = frozenset()
        # Of requests that were not taken since the last StepEnd.
        self._refusals: list[worker_pb2.Failure] = []
        # When the last StepEnd was sent, by time.monotonic().
        self._last_end = time.monotonic()
        # When the last step's tokens were there, by time.monotonic().
        self._last_found = 0.0
        # Steps that raised since the last one that did not.
        self._raises = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    def run(self) -> None:
        """Serves for ever. Raises FrontGoneError, FrameError or EngineDownError."""
        busy = False
        while True:
            busy = self.turn(self._pipe.receive(0 if busy else HEARTBEAT_SECONDS))

    def turn(self, frames: Iterable[engine_pb2.FrontFrame]) -> bool:
        """Takes frames and computes a step; False if there was nothing to compute."""
        for frame in frames:
            self._take(frame)
        for request, rejected in self._grammars.compiled():
            self._add(request, rejected)
        flight = self._flight or self._begin(self._scheduler.schedule(time.monotonic()))
        if not flight.plan.slices:
            self._send_end()
            return False
        self._announce(flight.plan)
        self._flight = self._begin_next(flight)
        self._finish(flight)
        return True

    def stats(self) -> engine_pb2.EngineStats:
        stats = self._scheduler.stats()
        return engine_pb2.EngineStats(
            step=self._steps,
            running=stats.running,
            waiting=stats.waiting + self._grammars.compiling,
            max_running=self._max_running,
            kv_pages_used=stats.cache.pages_used,
            kv_pages_cached=stats.cache.pages_cached,
            kv_pages_total=stats.cache.pages_total,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=stats.cached_tokens,
            preemptions=stats.preemptions,
            late_compilations=self._late_compilations(),
        )

    def _take(self, frame: engine_pb2.FrontFrame) -> None:
        if frame.WhichOneof("frame") == "cancel":
            # False: it finished meanwhile.
            self._scheduler.cancel(frame.cancel.handle)
            self._grammars.forget([frame.cancel.handle])
            return
        request = request_from(frame.submit, time.monotonic())
        if request.grammar is None:
            self._add(request)
        else:
            self._grammars.compile(request)

    def _add(self, request: Request, rejected: Rejected | None = None) -> None:
        """Gives it to the scheduler, unless it is `rejected` already."""
        try:
            if rejected is not None:
                raise rejected
            self._scheduler.add(request)
        except Rejected as refusal:
            self._refuse(request, refused(request.handle, refusal))
        except Exception as error:
            # In no step, but guilty all the same: it must not come back for ever.
            log.exception("request not taken", request_id=request.request_id)
            message = f"taking the request raised {type(error).__name__}: {error}"
            self._refuse(request, failed(request.handle, message))
        else:
            self._prompt_tokens += len(request.token_ids)

    def _refuse(self, request: Request, failure: worker_pb2.Failure) -> None:
        self._refusals.append(failure)
        self._grammars.forget([request.handle])

    def _begin(self, plan: StepPlan) -> Flight:
        """Launches a step, if not all of it is left to do."""
        self._tell_late(plan)
        if not self._launches(plan):
            return Flight(plan, time.monotonic(), partial(self._compute, plan))
        self._announce(plan)
        return self._launch(plan, None)

    def _begin_next(self, flight: Flight) -> Flight | None:
        """Launches the step after `flight`, if that need not be complete."""
        plan = None if flight.launched is None else self._scheduler.ahead(time.monotonic())
        if plan is None:
            return None
        self._tell_late(plan)
        return self._launch(plan, flight.launched)

    def _tell_late(self, plan: StepPlan) -> None:
        self._grammars.forget(handle for handle, _ in plan.refused)
        self._refusals += [refused(handle, rejected) for handle, rejected in plan.refused]

    def _launches(self, plan: StepPlan) -> bool:
        """Whether a step can be launched: then those planned ahead of it can be, too."""
        return (
            self._ahead is not None
            and bool(plan.slices)
            and self._ahead.offers(plan.slices)
            and all(piece.sample and self._is_plain(piece.handle) for piece in plan.slices)
        )

    def _is_plain(self, handle: int) -> bool:
        return handle not in self._grammars and self._row(handle, NO_MASKS).plain

    def _launch(self, plan: StepPlan, before: Launched | None) -> Flight:
        """`before`: the step that it was planned ahead of, whose tokens are not in the histories yet."""
        assert self._ahead is not None
        begun, unknown = time.monotonic(), 0 if before is None else 1
        rows = [self._row(handle, NO_MASKS, unknown) for handle in plan.handles]
        try:
            launched = self._ahead.launch(plan.slices, rows, before)
        except Exception as error:
            # To be told in its turn: the step before may be well.
            return Flight(plan, begun, partial(_raise, error))
        return Flight(plan, begun, partial(_collect, plan, launched), launched)

    def _announce(self, plan: StepPlan) -> None:
        """Names those that are to blame if the engine dies. A step that was planned ahead has none but those
        of the step before."""
        handles = frozenset(plan.handles)
        if handles != self._announced:
            self._pipe.send(engine_pb2.EngineFrame(begin=engine_pb2.StepBegin(handles=plan.handles)))
            self._announced = handles

    def _finish(self, flight: Flight) -> None:
        """Waits for a step's tokens, and sends what they bring."""
        plan = flight.plan
        self._steps += 1
        try:
            sampled, failures = flight.find()
            ended = self._follow(sampled, failures)
        except FrontGoneError:
            raise
        except Exception as error:
            if isinstance(error, self._device_errors):
                # Every later call on this device would fail too: only a new process gets a new context.
                message = f"the device reported: {error}"
                raise EngineDownError(worker_pb2.REASON_GPU_FAULT, message) from error
            self._fail(plan, error)
            return
        self._raises = 0
        # What was launched ahead is computed from when the step before it was.
        begun, self._last_found = max(flight.begun, self._last_found), time.monotonic()
        gone = self._scheduler.fail(failure.handle for failure in failures)
        failures = [failure for failure in failures if failure.handle in gone]
        tokens = {handle: (one.token_id,) for handle, one in sampled.items()}
        outputs = self._scheduler.complete(plan, tokens, ended)
        self._grammars.forget(gone)
        self._grammars.forget(output.handle for output in outputs if output.finish is not None)
        self._generated_tokens += sum(len(output.token_ids) for output in outputs)
        deltas = [delta_from(output, sampled[output.handle].logprobs) for output in outputs]
        self._send_end(deltas, failures, _computed(plan, self._last_found - begun))

    def _compute(self, plan: StepPlan) -> Found:
        """The whole of a step."""
        self._faults.check(plan.slices)
        sampling = [piece.handle for piece in plan.slices if piece.sample]
        bound = [handle for handle in sampling if handle in self._grammars]
        self._grammars.begin({handle: self._barred(handle) for handle in bound})
        logits, find_faulty = self._runner.step(plan.slices, self._progress)
        masks = self._grammars.masks()
        rows = {row: handle for row, handle in enumerate(sampling) if handle not in masks.faults}
        failures = {
            handle: refused(handle, Rejected("BAD_REQUEST", fault)) for handle, fault in masks.faults.items()
        }
        # First the draw, so that a GPU goes on with it; of faulty ones in vain.
        try:
            sampled = self._draw(logits, rows, masks)
        except NonFiniteLogitsError as error:
            numbers = list(rows)
            infinite = [rows.pop(numbers[index]) for index in error.rows]
            failures |= {handle: not_finite(handle) for handle in infinite}
            sampled = self._draw(logits, rows, masks)
        # What came first is the cause of the others.
        failures |= {handle: failed(handle, "its hidden states are not finite") for handle in find_faulty()}
        sound = {handle: one for handle, one in sampled.items() if handle not in failures}
        return sound, [*failures.values()]

    def _draw(self, logits: Logits, rows: Mapping[int, int], masks: Masks) -> dict[int, Sampled]:
        """By handle. `rows`: handles by their rows of the logits; no others are sampled."""
        chosen = logits if len(rows) == len(logits) else logits[list(rows)]
        sampled = self._sample(chosen, [self._row(handle, masks) for handle in rows.values()])
        return dict(zip(rows.values(), sampled, strict=True))

    def _follow(self, sampled: Mapping[int, Sampled], failures: list[worker_pb2.Failure]) -> set[int]:
        """Moves grammars on; returns whose texts are whole, and adds the failures of those that it cannot."""
        whole: set[int] = set()
        for handle, one in sampled.items():
            try:
                if self._grammars.accept(handle, one.token_id):
                    whole.add(handle)
            except GrammarError as error:
                failures.append(refused(handle, Rejected("BAD_REQUEST", str(error))))
        return whole

    def _row(self, handle: int, masks: Masks, unknown: int = 0) -> SampleRow:
        history = self._scheduler.history(handle)
        request = history.request
        allowed = masks.rows.get(handle)
        early = allowed is None and len(history.output_ids) < request.min_tokens
        return SampleRow(
            params=request.sampling,
            prompt_ids=history.prompt_ids,
            output_ids=history.output_ids,
            banned=request.stop_token_ids if early else frozenset(),
            allowed=allowed,
            unknown=unknown,
        )

    def _barred(self, handle: int) -> frozenset[int]:
        """What a grammar would let an answer end with, though it must go on if it can."""
        history = self._scheduler.history(handle)
        stops = history.request.stop_token_ids
        early = len(history.output_ids) < history.request.min_tokens
        return self._eos_token_ids | stops if early else self._eos_token_ids - stops

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Gives up what was in the step, and nothing else."""
        log.exception("step raised", step=self._steps, requests=len(plan.slices))
        message = f"the engine's step raised {type(error).__name__}: {error}"
        gone = self._scheduler.fail(plan.handles)
        self._scheduler.complete(plan, {})
        # Not if all that were in it had ended with the step that it was planned ahead of.
        self._raises += bool(gone)
        if self._raises >= MAX_RAISES:
            raise EngineDownError(
                worker_pb2.REASON_ENGINE_DEAD, f"{self._raises} steps in a row raised; of the last: {message}"
            ) from error
        self._grammars.forget(gone)
        self._send_end(failures=[failed(handle, message) for handle in gone])

    def _progress(self) -> None:
        """Keeps a step that takes long from being taken for a stall. The frame brings nothing."""
        if time.monotonic() - self._last_end >= HEARTBEAT_SECONDS:
            self._send_end()

    def _send_end(
        self,
        deltas: Sequence[worker_pb2.Delta] = (),
        failures: Sequence[worker_pb2.Failure] = (),
        step: engine_pb2.ComputedStep | None = None,
    ) -> None:
        failures = [*self._refusals, *failures]
        end = engine_pb2.StepEnd(
            deltas=deltas, failures=failures, stats=self.stats(), step=step, experts=self._expert_use()
        )
        self._refusals.clear()
        self._pipe.send(engine_pb2.EngineFrame(end=end))
        self._last_end = time.monotonic()


def _collect(plan: StepPlan, launched: Launched) -> Found:
    """Of a launched step."""
    found = dict(zip(plan.handles, launched.collect(), strict=True))
    sampled = {handle: Sampled(token_id, None) for handle, token_id in found.items() if token_id >= 0}
    return sampled, [not_finite(handle) for handle in found if handle not in sampled]


def _raise(error: Exception) -> Found:
    raise error


def _computed(plan: StepPlan, seconds: float) -> engine_pb2.ComputedStep:
    tokens = sum(len(piece.token_ids) for piece in plan.slices)
    return engine_pb2.ComputedStep(requests=len(plan.slices), tokens=tokens, seconds=seconds)
