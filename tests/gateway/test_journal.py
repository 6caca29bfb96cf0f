"""The record of a generation: what is submitted after each failure, and what the client sees of it."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_gateway import recovery
from moebius_gateway.journal import Failure, Record, Submission
from moebius_gateway.types import FinishReason, Reason, TokenLogprobs, Tokens
from moebius_gateway.workers.view import WorkerState, WorkerView
from tests.gateway.dispatching import MODEL, generation
from tests.gateway.worker_standin import advance, next_token, state_of, undisturbed


def died(in_step: bool | None = True, worker: str = "a", incarnation: str = "a-1") -> Failure:
    return Failure(worker, incarnation, Reason.ENGINE_DEAD, "killed", in_step=in_step)


def test_a_first_attempt_is_the_generation() -> None:
    wanted = generation((5, 6), max_tokens=9, stop=(2,))
    submission = Record(wanted, MODEL).submit(41, wanted.deadline - 3)
    assert submission == Submission(
        41, wanted.request_id, (5, 6), 0, wanted.sampling, 9, 0, (2,), False, deadline_ms=3000
    )


def test_what_a_worker_began_is_not_given_up_by_the_next_for_having_waited() -> None:
    record = Record(generation(), MODEL)
    assert record.submit(1, 0.0).deadline_ms > 0
    record.note(Failure("a", "1", Reason.ENGINE_DEAD, "why"), 0.0)
    assert record.submit(2, 0.0).deadline_ms == 0


def test_a_later_attempt_continues_after_what_was_delivered() -> None:
    record = Record(generation((5, 6), max_tokens=9), MODEL)
    record.submit(1, 0.0)
    record.deliver(Tokens((10,)))
    record.deliver(Tokens((11, 12)))
    record.note(died(), 0.0)
    submission = record.submit(2, 0.0)
    assert submission.token_ids == (5, 6, 10, 11, 12)
    assert submission.resumed == 3
    assert submission.max_tokens == 9


def test_prefix_hits_are_reported_once() -> None:
    record = Record(generation(), MODEL)
    record.submit(1, 0.0)
    assert record.deliver(Tokens((10,), cached_tokens=2)).cached_tokens == 2
    record.note(died(), 0.0)
    record.submit(2, 0.0)
    assert record.deliver(Tokens((11,), cached_tokens=4)) == Tokens((11,))


def test_two_suspected_deaths_in_a_row_quarantine() -> None:
    record = Record(generation(), MODEL)
    assert not record.submit(1, 0.0).quarantined
    assert record.note(died(in_step=True), 0.0)
    assert not record.submit(2, 0.0).quarantined
    assert record.note(died(in_step=None), 0.0)
    assert record.submit(3, 0.0).quarantined


def test_bystanders_and_the_refused_get_no_strike() -> None:
    record = Record(generation(), MODEL)
    assert not record.note(died(in_step=False), 0.0)
    for reason in (Reason.OVERLOADED, Reason.DRAINING, Reason.NOT_READY):
        # Whatever a worker says beside it: backpressure is no fault.
        assert not record.note(Failure("a", "a-1", reason, "later", in_step=True), 0.0)
    assert record.strikes == 0
    assert not record.submit(1, 0.0).quarantined


def test_a_new_token_clears_the_strikes() -> None:
    record = Record(generation(), MODEL)
    for handle in (1, 2):
        record.submit(handle, 0.0)
        record.note(died(), 0.0)
        record.deliver(Tokens((10 + handle,)))
    assert record.strikes == 0
    assert not record.submit(3, 0.0).quarantined


def test_quarantine_ends_with_a_token_once_and_then_stays() -> None:
    record = Record(generation(), MODEL)
    for expected in (True, False):
        for _ in range(2):
            record.submit(1, 0.0)
            record.note(died(), 0.0)
        assert record.submit(2, 0.0).quarantined
        assert not record.may_rejoin()
        record.deliver(Tokens((10,)))
        assert record.may_rejoin() is expected


def test_pauses_before_the_same_worker_grow_and_end() -> None:
    record = Record(generation(), MODEL)
    pauses = []
    for _ in range(2000):
        record.note(died(), 100.0)
        pauses.append(record.marks["a"].until - 100.0)
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < pauses[-1] == 2.0


def test_a_refusal_that_names_a_time_is_kept_to() -> None:
    record = Record(generation(), MODEL)
    record.note(Failure("a", "a-1", Reason.OVERLOADED, "full", retry_after=7.0), 100.0)
    assert record.marks["a"].until == 107.0


def test_a_generation_that_was_delivered_whole_is_finished_without_its_worker() -> None:
    record = Record(generation(max_tokens=3, stop=(2,)), MODEL)
    assert record.finish_reason() is None
    record.deliver(Tokens((10, 11)))
    assert record.finish_reason() is None
    record.deliver(Tokens((12,)))
    assert record.finish_reason() is FinishReason.LENGTH
    stopped = Record(generation(max_tokens=3, stop=(2,)), MODEL)
    stopped.deliver(Tokens((2,)))
    assert stopped.finish_reason() is FinishReason.STOP


# ---- any schedule of failures gives the undisturbed tokens ----------------------------------------------

FAULTS = {
    "in step": died(True),
    "bystander": died(False),
    "reset": died(None),
    "stalled": replace(died(True), reason=Reason.ENGINE_STALLED),
    "device": replace(died(True), reason=Reason.GPU_FAULT),
    "full": Failure("", "", Reason.OVERLOADED, "full", retry_after=1.0),
    "draining": Failure("", "", Reason.DRAINING, "draining"),
    "not ready": Failure("", "", Reason.NOT_READY, "loading"),
}


def worker_gives(submission: Submission, count: int, chunk: int) -> list[Tokens]:
    """What a true worker would send for the next `count` tokens, `chunk` of them in a delta."""
    state = state_of(submission.token_ids, submission.sampling.seed)
    tokens: list[int] = []
    finish = None
    while len(tokens) < count and finish is None:
        tokens.append(next_token(state))
        state = advance(state, tokens[-1])
        if tokens[-1] in submission.stop_token_ids:
            finish = FinishReason.STOP
        elif submission.resumed + len(tokens) >= submission.max_tokens:
            finish = FinishReason.LENGTH
    pieces = [
        Tokens(tuple(part), tuple(TokenLogprobs(-token / 100, ()) for token in part))
        for part in (tokens[start : start + chunk] for start in range(0, len(tokens), chunk))
    ]
    if finish:
        pieces[-1] = replace(pieces[-1], finish_reason=finish)
    return pieces


@settings(deadline=None, max_examples=200)
@given(
    schedule=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from(sorted(FAULTS)), st.integers(0, 2), st.booleans())
    ),
    prompt=st.lists(st.integers(3, 255), min_size=1, max_size=5),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 30),
    stop=st.lists(st.integers(3, 255), max_size=3),
    chunk=st.integers(1, 4),
)
def test_any_schedule_of_failures_gives_the_undisturbed_tokens(
    schedule: Sequence[tuple[int, str, int, bool]],
    prompt: list[int],
    seed: int,
    max_tokens: int,
    stop: list[int],
    chunk: int,
) -> None:
    wanted = generation(prompt, seed=seed, max_tokens=max_tokens, stop=stop)
    record = Record(wanted, MODEL)
    incarnations = [1, 1, 1]
    now = wanted.deadline - 1e6
    wanted = replace(wanted, deadline=now + 1e6)
    expected = undisturbed(prompt, seed, max_tokens, stop)
    seen: list[Tokens] = []
    failure: Failure | None = None
    events = iter(schedule)

    def attempt(view: WorkerView, handle: int) -> Failure | None:
        submission = record.submit(handle, 0.0)
        count, fault, shift, restarts = next(events, (10**6, "", 0, False))
        for piece in worker_gives(submission, count, chunk):
            seen.append(record.deliver(piece))
            if piece.finish_reason:
                return None
        now_failed = replace(FAULTS[fault], worker=view.address, incarnation=view.incarnation)
        incarnations[int(view.address)] += restarts
        incarnations[shift] += restarts
        return now_failed

    for handle in range(2 * len(schedule) + 2):
        while True:
            views = [
                WorkerView(str(i), WorkerState.READY, incarnation=f"{i}-{n}", model=MODEL, max_running=4)
                for i, n in enumerate(incarnations)
            ]
            decision = recovery.decide(record, failure, views, now)
            if not isinstance(decision, recovery.Wait):
                break
            assert decision.until > now
            now = decision.until
        if isinstance(decision, recovery.Fail):
            break
        failure = attempt(decision.workers[0], handle)
        if failure is None:
            break
        record.note(failure, now)
        if record.finish_reason():
            break

    tokens = [token for piece in seen for token in piece.token_ids]
    assert [one.logprob for piece in seen for one in piece.logprobs] == [-token / 100 for token in tokens]
    if isinstance(decision, recovery.Fail):
        # Only for what may end a request: three suspected deaths without a token, or no room at the start.
        assert tuple(tokens) == expected[: len(tokens)]
        if decision.error.reason is Reason.OVERLOADED:
            assert tokens == []
        else:
            assert decision.error.reason in (Reason.POISONED, Reason.ENGINE_DEAD)
            assert record.strikes > 2
    else:
        assert tuple(tokens) == expected
        finished = seen[-1].finish_reason or record.finish_reason()
        assert finished is (FinishReason.STOP if expected[-1] in stop else FinishReason.LENGTH)
