"""After any history of its workers a choice is what one over whole views of all of them would be."""

import asyncio
import time
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_gateway import recovery
from moebius_gateway.journal import Failure, Record
from moebius_gateway.types import Reason
from moebius_gateway.workers import routing
from moebius_gateway.workers.dispatcher import DispatcherOptions
from moebius_gateway.workers.fleet import SAMPLE
from moebius_gateway.workers.health import LONGEST_EJECTION
from moebius_gateway.workers.link import Link
from moebius_gateway.workers.view import Standing, WorkerState, WorkerView
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.dispatching import MODEL, Gateway, generation

WORKERS = 5
# As few as these are all looked at, so that the best of them is the best of all.
assert WORKERS <= SAMPLE
SHORT = replace(MODEL, max_model_len=64)
PROMPTS = [tuple(range(3 + number, 3 + number + length)) for number in range(2) for length in (40, 70, 2000)]

worker = st.integers(0, WORKERS - 1)
events = st.one_of(
    st.tuples(
        st.just("report"),
        worker,
        st.sampled_from([pb.STATE_READY] * 4 + [pb.STATE_LOADING, pb.STATE_DRAINING]),
        st.integers(0, 20),
        st.sampled_from([0, 4, 16]),
        # Of which incarnation.
        st.sampled_from("aaaaab"),
    ),
    st.tuples(st.just("learn"), worker, st.sampled_from([MODEL, MODEL, SHORT])),
    st.tuples(st.just("submit"), worker, st.sampled_from(PROMPTS)),
    st.tuples(st.just("finish"), worker),
    st.tuples(st.just("token"), worker),
    st.tuples(st.just("die"), worker, st.integers(1, 3)),
    st.tuples(st.just("leave"), worker),
    st.tuples(st.just("lose"), worker),
    st.tuples(st.just("retire"), worker),
)


# What happens, to which worker, and how.
Event = tuple[Any, ...]


class History:
    """Workers that are ready at first; what happens to them comes in the way of their streams."""

    def __init__(self) -> None:
        self.gateway = Gateway(DispatcherOptions(workers=tuple(f"w{i}:1" for i in range(WORKERS))))
        self.links = list(self.gateway._links.values())
        self.handles = 0
        for link, model in zip(self.links, (MODEL, SHORT, MODEL, MODEL, SHORT), strict=True):
            self.report(link, pb.STATE_READY, 0, 16, "a")
            self.learn(link, model)

    def take(self, event: Event) -> None:
        what, number, *how = event
        getattr(self, what)(self.links[number], *how)

    def report(self, link: Link, state: int, running: int, most: int, incarnation: str) -> None:
        status = pb.Status(state=state, running=running, max_running=most, incarnation=incarnation)
        link._take(pb.WorkerFrame(status=status))

    def learn(self, link: Link, model: object) -> None:
        if link.view().state is WorkerState.READY and link._model is None:
            link._model = model  # type: ignore[assignment]
            link._changed()

    def submit(self, link: Link, prompt: tuple[int, ...]) -> None:
        if link.view().serves(MODEL, len(prompt)):
            self.handles += 1
            record = Record(generation(prompt), MODEL)
            blocks = routing.prefix_blocks(prompt, MODEL.id)
            link.submit(record.submit(self.handles, 0.0), blocks, record.generation.deadline)

    def token(self, link: Link) -> None:
        deltas = [pb.Delta(handle=handle, token_ids=[5]) for handle in link._attempts]
        link._take(pb.WorkerFrame(deltas=deltas))

    def finish(self, link: Link) -> None:
        last = [
            pb.Delta(handle=handle, finish_reason=pb.FINISH_REASON_STOP)
            for handle in list(link._attempts)[:1]
        ]
        link._take(pb.WorkerFrame(deltas=last))

    def die(self, link: Link, times: int) -> None:
        error = pb.Error(reason=pb.REASON_ENGINE_DEAD, message="died")
        for _ in range(times):
            self.submit(link, PROMPTS[0])
            failures = [pb.Failure(handle=handle, error=error) for handle in link._attempts]
            link._take(pb.WorkerFrame(failures=failures))

    def leave(self, link: Link) -> None:
        for handle in list(link._attempts)[:1]:
            link._cancel(handle)

    def lose(self, link: Link) -> None:
        link._detach("lost")

    def retire(self, link: Link) -> None:
        link.retire()


def standing(view: WorkerView) -> Standing:
    """As it would be made anew."""
    longest = view.model.max_model_len if view.model is not None else 0
    most = max(view.max_running, 1)
    return Standing(view.address, view.load, view.in_flight, most, longest, view.on_trial)


def over_all(
    it: History, record: Record, failure: Failure | None, now: float
) -> tuple[recovery.Decision, str]:
    """The decision over whole views of all workers, those that did nothing to it first, and the best of those
    that it allows."""
    order = {link.address: place for place, link in enumerate(it.gateway._fleet.ready(record.model))}
    views = sorted(it.gateway.workers(), key=lambda view: order.get(view.address, WORKERS))
    clean = [view for view in views if view.address not in record.marks]
    decision = recovery.decide(record, failure, clean, now)
    if isinstance(decision, recovery.Wait):
        decision = recovery.decide(record, failure, views, now)
    if not isinstance(decision, recovery.Place):
        return decision, ""
    matched = it.gateway._prefixes.match(routing.prefix_blocks(record.generation.prompt_ids, MODEL.id))
    return decision, routing.pick([standing(view) for view in decision.workers], matched)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(events, max_size=40), st.sampled_from(PROMPTS), st.just(set(range(WORKERS))) | st.sets(worker)
)
def test_a_choice_is_the_one_over_all_views(
    history: list[Event], prompt: tuple[int, ...], failed_on: set[int]
) -> None:
    asyncio.run(compare(history, prompt, failed_on))


async def compare(history: list[Event], prompt: tuple[int, ...], failed_on: set[int]) -> None:
    it = History()
    for event in history:
        it.take(event)
        for link in it.links:
            assert link.standing == standing(link.view())
    ready = [view.address for view in it.gateway.workers() if view.serves(MODEL)]
    assert sorted(one.address for one in it.gateway._fleet.ready(MODEL)) == ready

    now = time.monotonic()
    record, failure = Record(generation(prompt, seconds=100), MODEL), None
    blocks = routing.prefix_blocks(prompt, MODEL.id)

    def check() -> None:
        # At once, and when no worker is ejected any more.
        for at in (now, now + LONGEST_EJECTION + 1):
            decision, best = over_all(it, record, failure, at)
            choice = it.gateway._decide(record, failure, it.gateway._prefixes.match(blocks), at)
            assert choice == (best if isinstance(decision, recovery.Place) else decision)

    check()
    # Some died under it or refused it: others go first, and if there is none it is again a matter of all.
    for number in failed_on:
        link = it.links[number]
        reason = (Reason.ENGINE_DEAD, Reason.OVERLOADED)[number % 2]
        failure = Failure(link.address, link.view().incarnation, reason, "not this one", in_step=False)
        record.note(failure, now)
    check()
