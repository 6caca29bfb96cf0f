"""Where a generation goes next: a pure decision over its record, its last failure, and the known workers."""

from collections.abc import Sequence
from dataclasses import dataclass

from moebius_gateway.journal import DEATHS, QUARANTINE_STRIKES, Failure, Record
from moebius_gateway.types import GenerationError, Reason
from moebius_gateway.workers.view import WorkerView

# Suspected deaths in a row, without a token in between, after which a request is given up though nobody
# could say that it was the cause.
MAX_STRIKES = 8
# What a client is told when nobody knows better, in seconds.
RETRY_AFTER = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """Submit it to one of these; never empty."""

    workers: tuple[WorkerView, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide again when a worker changes, and at this time (of time.monotonic()) at the latest."""

    until: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the client."""

    error: GenerationError


Decision = Place | Wait | Fail


def decide(record: Record, failure: Failure | None, workers: Sequence[WorkerView], now: float) -> Decision:
    """What to do with a generation that runs nowhere.

    `failure` is its last one, already noted in the record; None if it had none. The same question is
    asked again whenever something changes while it waits.
    """
    if fail := foregone(record, failure, now):
        return fail
    ready = [worker for worker in workers if worker.serves(record.model, record.length)]
    if able := [worker for worker in ready if worker.admits(now) and _resumes(record, worker) <= now]:
        return Place(_liked_best(record, able) if record.marks else tuple(able))
    if overload := _overload(record, ready, now):
        return Fail(overload)
    times = [max(_resumes(record, worker), worker.ejected_until) for worker in ready]
    return Wait(min([record.generation.deadline, *(time for time in times if time > now)]))


def foregone(record: Record, failure: Failure | None, now: float) -> Fail | None:
    """What is decided whatever the workers are like."""
    if failure is not None and (error := _verdict(record, failure)):
        return Fail(error)
    return Fail(too_late(record)) if now >= record.generation.deadline else None


def too_late(record: Record) -> GenerationError:
    """The error of a generation whose deadline passed."""
    name = record.generation.model
    if record.delivered:
        message = (
            f"The deadline passed after {len(record.delivered)} tokens: ask for fewer, or allow more time"
        )
        return GenerationError(Reason.NOT_READY, message, retryable=True)
    if any(mark.reason is Reason.OVERLOADED for mark in record.marks.values()):
        message = f"Model {name!r} was overloaded until the deadline"
        return GenerationError(Reason.OVERLOADED, message, retryable=True, retry_after=RETRY_AFTER)
    message = f"No worker of model {name!r} gave a token before the deadline"
    return GenerationError(Reason.NOT_READY, message, retryable=True, retry_after=RETRY_AFTER)


def _verdict(record: Record, failure: Failure) -> GenerationError | None:
    """The error if the failure is final whatever the workers do."""
    if failure.reason in (Reason.BAD_REQUEST, Reason.KV_EXHAUSTED):
        return GenerationError(failure.reason, failure.message, retryable=False)
    if failure.reason not in DEATHS:
        return None
    if record.alone and failure.in_step and record.strikes > QUARANTINE_STRIKES:
        message = (
            f"This request failed in {record.strikes} engines in a row, in the last while it was computed "
            f"alone. Do not send it again unchanged. Last fault: {failure.message}"
        )
        return GenerationError(Reason.POISONED, message, retryable=False)
    if record.strikes >= MAX_STRIKES:
        message = f"{record.strikes} workers in a row died under this request. Last: {failure.message}"
        return GenerationError(Reason.ENGINE_DEAD, message, retryable=True, retry_after=RETRY_AFTER)
    return None


def _resumes(record: Record, worker: WorkerView) -> float:
    """When the worker may be asked again, seen from this request."""
    mark = record.marks.get(worker.address)
    return mark.until if mark is not None and mark.incarnation == worker.incarnation else 0.0


def _liked_best(record: Record, workers: Sequence[WorkerView]) -> tuple[WorkerView, ...]:
    best = min(_grudge(record, worker) for worker in workers)
    return tuple(worker for worker in workers if _grudge(record, worker) == best)


def _grudge(record: Record, worker: WorkerView) -> int:
    """How much the request would rather go elsewhere: nothing learnt is held against a new incarnation,
    but one that never died under it is better still."""
    mark = record.marks.get(worker.address)
    if mark is None or mark.reason not in DEATHS:
        return 0
    return 2 if mark.incarnation == worker.incarnation else 1


def _overload(record: Record, ready: Sequence[WorkerView], now: float) -> GenerationError | None:
    """The error if all that could serve it refuse it for longer than it may wait; one that was displaced
    waits until its deadline."""
    if record.displaced or not ready or record.refused_at is None:
        return None
    times = [_resumes(record, worker) for worker in ready]
    patience = min(record.generation.deadline, record.refused_at + record.max_wait)
    if min(times) <= max(patience, now):
        return None
    message = f"All workers of model {record.generation.model!r} are full"
    return GenerationError(Reason.OVERLOADED, message, retryable=True, retry_after=min(times) - now)
