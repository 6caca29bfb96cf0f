"""Where a generation goes after a failure: one table of situations, no I/O."""

import pytest

from moebius_gateway.journal import Failure, Record
from moebius_gateway.recovery import MAX_STRIKES, Decision, Fail, Place, Wait, decide
from moebius_gateway.types import GenerationError, ModelInfo, Reason, Tokens
from moebius_gateway.workers.view import WorkerState, WorkerView
from tests.gateway.dispatching import MODEL, generation

DEATHS = (Reason.ENGINE_DEAD, Reason.ENGINE_STALLED, Reason.GPU_FAULT)
BACKPRESSURE = (Reason.OVERLOADED, Reason.DRAINING, Reason.NOT_READY)


def worker(
    address: str, state: WorkerState = WorkerState.READY, incarnation: str = "1", **more: object
) -> WorkerView:
    model = MODEL if state is WorkerState.READY else None
    return WorkerView(
        **({"address": address, "state": state, "incarnation": incarnation, "model": model} | more)
    )  # type: ignore[arg-type]


def failure(
    reason: Reason, worker: str = "a", *, in_step: bool | None = True, retry_after: float = 0.0
) -> Failure:
    return Failure(worker, "1", reason, "why", retry_after, in_step)


def record() -> Record:
    return Record(generation(seconds=1000.0), MODEL)


def after(what: Record, *failures: Failure, workers: list[WorkerView], later: float = 0.0) -> Decision:
    """The decision after attempts that failed so, `later` seconds on."""
    now = what.generation.deadline - 1000.0
    for one in failures:
        what.submit(1, 0.0)
        what.note(one, now)
    return decide(what, failures[-1] if failures else None, workers, now + later)


def placed(decision: Decision) -> list[str]:
    assert isinstance(decision, Place), decision
    return [view.address for view in decision.workers]


def error(decision: Decision) -> GenerationError:
    assert isinstance(decision, Fail), decision
    return decision.error


def wait(what: Record, decision: Decision) -> float:
    """Seconds from the start until it must be decided again."""
    assert isinstance(decision, Wait), decision
    return decision.until - (what.generation.deadline - 1000.0)


def test_a_new_request_goes_to_any_ready_worker() -> None:
    workers = [worker("a"), worker("b", WorkerState.DRAINING), worker("c")]
    assert placed(after(record(), workers=workers)) == ["a", "c"]


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.READY])
def test_with_no_worker_ready_it_waits_until_the_deadline(state: WorkerState) -> None:
    what = record()
    assert wait(what, after(what, workers=[worker("a", state)])) == pytest.approx(1000.0)
    assert wait(what, after(what, workers=[])) == pytest.approx(1000.0)


def test_past_the_deadline_it_fails_as_not_ready() -> None:
    failed = error(after(record(), workers=[worker("a")], later=1000.0))
    assert failed.reason is Reason.NOT_READY
    assert failed.retryable
    assert failed.retry_after > 0


def test_past_the_deadline_in_mid_stream_it_says_how_far_it_came() -> None:
    what = record()
    what.deliver(Tokens((10, 11)))
    failed = error(after(what, workers=[worker("a")], later=1000.0))
    assert failed.reason is Reason.NOT_READY
    assert "2 tokens" in failed.message


def test_another_model_of_the_same_name_does_not_continue_it() -> None:
    other = ModelInfo("standin", "StandIn", "another tokenizer", 4096, 256, (2,), 0)
    assert isinstance(after(record(), workers=[worker("a", model=other)]), Wait)


def test_a_worker_with_too_little_context_does_not_continue_it() -> None:
    small = ModelInfo("standin", "StandIn", "hash", 5, 256, (2,), 0)
    what = record()
    assert placed(after(what, workers=[worker("a", model=small)])) == ["a"]
    what.deliver(Tokens((10, 11)))
    assert placed(after(what, workers=[worker("a", model=small), worker("b")])) == ["b"]


@pytest.mark.parametrize("reason", [Reason.BAD_REQUEST, Reason.KV_EXHAUSTED])
def test_what_no_worker_can_do_fails_at_once(reason: Reason) -> None:
    failed = error(after(record(), failure(reason), workers=[worker("a"), worker("b")]))
    assert failed.reason is reason
    assert failed.message == "why"
    assert not failed.retryable


@pytest.mark.parametrize("reason", DEATHS)
@pytest.mark.parametrize("in_step", [True, False, None])
def test_after_a_death_it_goes_elsewhere_at_once(reason: Reason, in_step: bool | None) -> None:
    decision = after(record(), failure(reason, in_step=in_step), workers=[worker("a"), worker("b")])
    assert placed(decision) == ["b"]


def test_the_only_worker_is_tried_again_after_a_pause_or_at_once_when_it_is_new() -> None:
    what = record()
    pause = wait(what, after(what, failure(Reason.ENGINE_DEAD), workers=[worker("a")]))
    assert 0 < pause < 1
    assert placed(after(what, workers=[worker("a")], later=pause)) == ["a"]
    assert placed(after(what, workers=[worker("a", incarnation="2")])) == ["a"]


def test_one_that_never_failed_it_is_best_then_one_that_was_restarted() -> None:
    what = record()
    deaths = [failure(Reason.ENGINE_DEAD, name) for name in ("a", "b")]
    workers = [worker("a"), worker("b", incarnation="2"), worker("c")]
    assert placed(after(what, *deaths, workers=workers, later=100.0)) == ["c"]
    assert placed(after(what, workers=workers[:2], later=100.0)) == ["b"]
    assert placed(after(what, workers=workers[:1], later=100.0)) == ["a"]


@pytest.mark.parametrize("reason", BACKPRESSURE)
def test_refused_it_tries_the_others_and_holds_nothing_against_the_worker(reason: Reason) -> None:
    what = record()
    refusal = failure(reason, retry_after=3.0)
    assert placed(after(what, refusal, workers=[worker("a"), worker("b")])) == ["b"]
    assert what.strikes == 0
    assert placed(after(what, workers=[worker("a"), worker("b")], later=3.0)) == ["a", "b"]


def test_full_everywhere_waits_until_there_may_be_room() -> None:
    full = [failure(Reason.OVERLOADED, name, retry_after=delay) for name, delay in (("a", 9.0), ("b", 3.0))]
    workers = [worker("a"), worker("b"), worker("c", WorkerState.LOADING)]
    what = record()
    assert wait(what, after(what, *full, workers=workers)) == pytest.approx(3.0)
    assert placed(after(what, workers=workers, later=3.0)) == ["b"]


def test_full_everywhere_for_longer_than_it_may_wait_is_said_at_once() -> None:
    full = [failure(Reason.OVERLOADED, name, retry_after=3.0) for name in ("a", "b")]
    workers = [worker("a"), worker("b"), worker("c", WorkerState.LOADING)]
    what = record()
    what.max_wait = 2.0
    failed = error(after(what, *full, workers=workers))
    assert failed.reason is Reason.OVERLOADED
    assert failed.retryable
    assert failed.retry_after == pytest.approx(3.0)


def test_full_again_and_again_is_said_when_it_has_waited_long_enough() -> None:
    what = record()
    what.max_wait = 5.0
    full = failure(Reason.OVERLOADED, retry_after=3.0)
    assert wait(what, after(what, full, workers=[worker("a")])) == pytest.approx(3.0)
    assert placed(after(what, workers=[worker("a")], later=3.0)) == ["a"]
    again = what.generation.deadline - 1000.0 + 3.0
    what.note(full, again)
    assert error(decide(what, full, [worker("a")], again)).retry_after == pytest.approx(3.0)


def test_full_beyond_its_deadline_is_said_at_once() -> None:
    what = record()
    full = failure(Reason.OVERLOADED, retry_after=2000.0)
    what.max_wait = 5000.0
    assert error(after(what, full, workers=[worker("a")])).reason is Reason.OVERLOADED


@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.NOT_READY])
def test_not_now_everywhere_waits(reason: Reason) -> None:
    what = record()
    decision = after(what, failure(reason, retry_after=3.0), workers=[worker("a")])
    assert wait(what, decision) == pytest.approx(3.0)


def test_a_request_that_lost_its_worker_waits_for_room() -> None:
    what = record()
    decision = after(
        what,
        failure(Reason.ENGINE_DEAD, "a"),
        failure(Reason.OVERLOADED, "b", retry_after=3.0),
        workers=[worker("a", WorkerState.RESTARTING), worker("b")],
    )
    assert wait(what, decision) == pytest.approx(3.0)


def test_a_stream_that_its_worker_gave_up_while_draining_waits_for_room() -> None:
    what = record()
    what.deliver(Tokens((10,)))
    full = failure(Reason.OVERLOADED, "b", retry_after=3.0)
    decision = after(what, failure(Reason.DRAINING, "a"), full, workers=[worker("b")])
    assert wait(what, decision) == pytest.approx(3.0)


def test_an_ejected_worker_is_left_alone_until_its_time() -> None:
    what = record()
    start = what.generation.deadline - 1000.0
    ejected = worker("a", on_trial=True, ejected_until=start + 4.0)
    assert wait(what, after(what, workers=[ejected])) == pytest.approx(4.0)
    assert placed(after(what, workers=[ejected, worker("b")])) == ["b"]
    assert placed(after(what, workers=[ejected], later=4.0)) == ["a"]
    trying = worker("a", on_trial=True, in_flight=1)
    assert wait(what, after(what, workers=[trying])) == pytest.approx(1000.0)


def test_three_deaths_the_last_alone_are_poison() -> None:
    what = record()
    deaths = [failure(Reason.ENGINE_DEAD, in_step=True)] * 3
    assert isinstance(after(what, *deaths[:2], workers=[worker("b")]), Place)
    failed = error(after(what, deaths[2], workers=[worker("b")]))
    assert failed.reason is Reason.POISONED
    assert not failed.retryable


def test_a_bystander_in_quarantine_is_not_accused() -> None:
    what = record()
    deaths = [failure(Reason.ENGINE_DEAD, in_step=True)] * 2
    bystander = failure(Reason.ENGINE_DEAD, in_step=False)
    assert isinstance(after(what, *deaths, *[bystander] * 20, workers=[worker("b")]), Place)


def test_a_death_after_progress_in_quarantine_is_not_poison() -> None:
    what = record()
    after(what, *[failure(Reason.ENGINE_DEAD)] * 2, workers=[])
    assert what.submit(3, 0.0).quarantined
    what.deliver(Tokens((10,)))
    death = failure(Reason.ENGINE_DEAD)
    what.note(death, 0.0)
    assert isinstance(decide(what, death, [worker("b")], 0.0), Place)


def test_unexplained_deaths_are_endured_longer() -> None:
    what = record()
    reset = failure(Reason.ENGINE_DEAD, in_step=None)
    assert isinstance(after(what, *[reset] * (MAX_STRIKES - 1), workers=[worker("b")]), Place)
    failed = error(after(what, reset, workers=[worker("b")]))
    assert failed.reason is Reason.ENGINE_DEAD
    assert failed.retryable
