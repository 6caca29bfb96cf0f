"""Steps that are planned ahead of the tokens of the step under way, as a device computes them: in order, and
the second one before the host has seen what the first one brought."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_worker.engine.types import Finish, Output, StepPlan
from tests.worker.engine.scheduler_world import STOP, World, config, request
from tests.worker.engine.test_scheduler_traces import LAYOUTS, OPERATIONS, Trace, be_busy, window_and_slots


class AheadWorld(World):
    """A world in which each step is followed by one that is planned ahead, whenever the scheduler has one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Steps that are computed and not complete, the oldest first; each with what it sampled.
        self.flights: list[tuple[StepPlan, dict[int, list[int]]]] = []
        self.ahead = 0
        # Slices of which nothing came, by request.
        self.in_vain: Counter[int] = Counter()

    def begin(self) -> StepPlan:
        if not self.flights:
            plan = super().begin()
            self.flights.append((plan, self.compute(plan)))
        plan, sampled = self.flights[0]
        following = self.scheduler.ahead(self.now)
        if following is not None:
            self.ahead += 1
            self._check_refused(following)
            following = self.known(following, plan, sampled)
            for piece in following.slices:
                self._check_slice(piece)
                assert piece.start == self.computed[piece.handle]
                self.computed[piece.handle] = piece.end
            assert set(following.handles) <= set(plan.handles)
            assert not any(self.requests[handle].quarantined for handle in plan.handles)
            assert self.scheduler.ahead(self.now) is None, "one is enough"
            with pytest.raises(RuntimeError, match="not complete"):
                self.scheduler.schedule(self.now)
            self.audit()
            self.audit_writers(following)
            self.flights.append((following, self.compute(following)))
        return plan

    def known(self, following: StepPlan, plan: StepPlan, sampled: dict[int, list[int]]) -> StepPlan:
        """With the tokens that the device finds where the slices say; they become part of the texts."""
        slices = []
        for piece in following.slices:
            [place] = piece.token_ids
            token = sampled[plan.handles[~place]][0]
            self.tokens[piece.handle].append(token)
            slices.append(piece._replace(token_ids=(token,)))
        return StepPlan(tuple(slices))

    def end(self, plan: StepPlan, failed: Sequence[int] = ()) -> list[Output]:
        _, sampled = self.flights.pop(0)
        following = self.flights[0][0] if self.flights else StepPlan(())
        self._spoil(StepPlan(tuple(piece for piece in following.slices if piece.handle in failed)))
        self.scheduler.fail(failed)
        return self.complete(plan, {handle: ids for handle, ids in sampled.items() if handle not in failed})

    def fail(self, plan: StepPlan) -> None:
        """What follows was computed with nonsense."""
        for one, _ in self.flights:
            self._spoil(one)
        self.flights.pop(0)
        self.scheduler.fail(plan.handles)
        assert self.complete(plan, {}) == []

    def complete(self, plan: StepPlan, sampled: dict[int, list[int]]) -> list[Output]:
        outputs = self.scheduler.complete(self.scheduler._plan, sampled)
        self.in_vain.update(set(sampled) - {output.handle for output in outputs})
        for output in outputs:
            self._deliver(output)
        for handle in plan.handles:
            if handle not in self.scheduler._requests:
                self._drop(handle)
        self.audit()
        for one, _ in self.flights:
            # Nobody was given what it still writes.
            self.audit_writers(one)
        return outputs

    def has_work(self) -> bool:
        return super().has_work() or bool(self.flights)

    def _deliver(self, output: Output) -> None:
        if any(output.handle in one.handles for one, _ in self.flights):
            # The next step has it already.
            del self.tokens[output.handle][-1]
        super()._deliver(output)


def decoding(*requests, **sizes) -> AheadWorld:
    """They are prefilled, and have their first tokens."""
    world = AheadWorld(config(**sizes))
    for asked in requests:
        world.add(asked)
    world.step()
    assert all(world.tokens[asked.handle] for asked in requests)
    return world


def test_steady_decoding_is_planned_ahead_to_its_last_step():
    world = decoding(request(1, 5, max_tokens=40), request(2, 9, max_tokens=30))
    world.drain()
    # The first one is a prefill, and what it is followed by cannot be ahead of it.
    assert world.ahead == 40 - 2
    assert not world.in_vain
    assert (len(world.outputs(1)), len(world.outputs(2))) == (40, 30)
    world.check_outputs()


def test_a_slice_names_the_row_that_its_token_is_drawn_from():
    world = World(config())
    for handle, max_tokens in ((1, 2), (2, 9), (3, 9)):
        world.add(request(handle, 5, max_tokens=max_tokens))
    world.step()
    scheduler = world.scheduler
    plan = scheduler.schedule(0)
    ahead = scheduler.ahead(0)
    assert [(piece.handle, piece.token_ids, piece.start, piece.sample) for piece in ahead.slices] == [
        (2, (~1,), 6, True),
        (3, (~2,), 6, True),
    ], "request 1 ends with the first step, by its length"
    with pytest.raises(RuntimeError, match="not that of the step under way"):
        scheduler.complete(ahead, {2: [1], 3: [1]})
    scheduler.complete(plan, {1: [1], 2: [1], 3: [1]})
    with pytest.raises(ValueError, match="no token was sampled for request 3"):
        scheduler.complete(ahead, {2: [1]})
    assert [output.handle for output in scheduler.complete(ahead, {2: [1], 3: [1]})] == [2, 3]
    assert scheduler.ahead(0) is None, "nothing is under way"


def test_who_ends_by_a_stop_token_is_computed_once_in_vain_and_keeps_its_pages_until_then():
    world = World(config())
    world.add(request(1, 7, max_tokens=20, stop=STOP))
    world.add(request(2, 7, max_tokens=20))
    world.step()
    scheduler = world.scheduler
    plan, ahead = scheduler.schedule(0), scheduler.ahead(0)
    first, second = scheduler.complete(plan, {1: [0], 2: [5]})
    assert (first.finish, second.finish) == (Finish.STOP, None)
    # Positions 0 to 8 of each, in pages of 4: the last pages came with the step that is under way.
    assert scheduler.stats().cache.pages_used == 6
    assert scheduler.stats().running == 1
    assert not scheduler.cancel(1)
    following = scheduler.ahead(0)
    assert following.handles == (2,)
    assert [output.handle for output in scheduler.complete(ahead, {1: [9], 2: [5]})] == [2]
    assert scheduler.stats().cache.pages_used == 3
    with pytest.raises(KeyError):
        scheduler.history(1)


@pytest.mark.parametrize("layout", ["full and state", "window and state"])
def test_what_is_kept_of_a_text_that_ended_is_what_was_computed(layout):
    """Its state stands one token further than its last token was drawn from."""
    world = AheadWorld(config(max_running=2, **LAYOUTS[layout]))
    for handle in range(40):
        text = [handle % 2, *range(1, 3 + handle % 5)]
        if handle > 3:
            text = [*world.conversations[handle - 2], 7]
        world.add(request(handle, text[-50:] if handle > 30 else text, max_tokens=9, stop=STOP))
        world.drain()
    world.check_outputs()
    assert sum(world.cached.values()) > 40
    assert sum(world.in_vain.values()) > 3


@pytest.mark.parametrize("cancelled", [True, False], ids=["cancelled", "failed"])
def test_a_state_that_went_on_without_its_request_is_not_kept(cancelled):
    """It is past the page's end at which the step before left it."""
    world = AheadWorld(config(**LAYOUTS["full and state"]))
    text = list(range(7))
    world.add(request(1, text, max_tokens=20))
    # A chunk of the prompt to its last page's end, and the rest.
    world.step()
    world.step()
    text = list(world.tokens[1])
    plan = world.begin()
    assert [piece.end for (piece,) in (one.slices for one, _ in world.flights)] == [8, 9]
    if cancelled:
        world.cancel(1)
    world.end(plan, failed=[] if cancelled else [1])
    world.step()
    world.add(request(2, [*text, 5, 6], max_tokens=3))
    world.drain()
    assert world.cached[2] == 4, "the snapshot of the prompt"
    world.check_outputs()


def test_nothing_is_planned_ahead_of_a_prefill_or_a_quarantined_request_or_past_one_that_may_begin():
    scheduler = World(config(max_running=2)).scheduler
    scheduler.add(request(1, 5, max_tokens=9))
    plan = scheduler.schedule(0)
    assert scheduler.ahead(0) is None
    scheduler.complete(plan, {1: [1]})
    plan = scheduler.schedule(0)
    scheduler.add(request(2, 5, max_tokens=9, quarantined=True))
    assert scheduler.ahead(0) is None
    scheduler.complete(plan, {1: [1]})
    for _ in range(4):
        plan = scheduler.schedule(0)
        assert scheduler.ahead(0) is None
        scheduler.complete(plan, {1: [1], 2: [1]})
    scheduler.cancel(2)
    plan = scheduler.schedule(0)
    assert scheduler.ahead(0)


def test_who_cannot_begin_anyway_does_not_stop_it_until_somebody_ends():
    world = decoding(request(1, 5, max_tokens=30), request(2, 5, max_tokens=12), max_running=2)
    world.add(request(3, 5, max_tokens=3))
    while 2 in world.tokens:
        world.step()
    # All but the first step of decodes. None is planned ahead of the last one's end, which leaves a place.
    assert world.ahead == 12 - 2
    assert 3 in world.step().handles
    world.drain()
    world.check_outputs()


def test_pages_are_never_taken_from_others_for_a_step_ahead():
    world = decoding(
        request(1, 7, max_tokens=30), request(2, 7, max_tokens=30), num_pages=12, growth_tokens=0
    )
    world.drain()
    assert world.scheduler.stats().preemptions > 0
    assert world.ahead > 20
    world.check_outputs()


def test_a_deadline_passes_while_steps_are_planned_ahead():
    world = decoding(request(1, 5, max_tokens=30), max_running=1)
    world.add(request(2, 5, deadline=4.0))
    for _ in range(6):
        world.step()
        world.now += 1
    assert world.expired == [2]
    world.drain()


def test_cancelled_between_the_two_steps_or_failed_with_the_first():
    world = decoding(*(request(handle, 7, max_tokens=20) for handle in range(4)))
    plan = world.begin()
    assert world.cancel(0)
    world.end(plan, failed=[1])
    assert set(world.scheduler._in_step) == {0, 1, 2, 3}, "all are in the step under way"
    plan = world.begin()
    world.cancel(2)
    world.end(plan, failed=[2, 0])
    world.drain()
    assert list(world.finished) == [3]
    assert world.in_vain == {0: 1, 1: 1, 2: 1} | {0: world.in_vain[0]}
    world.check_outputs()


def test_a_step_that_raises_takes_the_next_one_with_it():
    world = decoding(request(1, 7, max_tokens=20), request(2, 7, max_tokens=20))
    plan = world.begin()
    assert len(world.flights) == 2
    world.add(request(3, 7, max_tokens=5))
    world.fail(plan)
    assert world.scheduler.stats().running == 0
    world.step()
    assert world.scheduler.stats().cache.pages_used == 0
    world.drain()
    assert list(world.finished) == [3]


@settings(max_examples=300, deadline=None)
@given(
    operations=OPERATIONS,
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_pages=st.integers(1, 24),
    max_running=st.integers(1, 6),
    max_step_tokens=st.integers(1, 24),
    max_overtakes=st.integers(0, 4),
    growth_tokens=st.sampled_from([0, 0, 3, 16]),
    seed=st.integers(0, 2**32),
)
def test_any_trace_keeps_every_rule(operations, seed, **sizes):
    draw = random.Random(seed)
    sizes |= window_and_slots(sizes["page_size"], sizes["num_pages"], sizes["max_running"], draw)
    trace = Trace(AheadWorld(config(max_waiting=10, **sizes)), max_prompt=40, max_output=30)
    for operation, argument in operations:
        trace.apply(operation, argument)
    trace.finish()
    assert max(trace.world.in_vain.values(), default=0) <= 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_long_busy_traces(name):
    sizes = config(max_running=12, max_step_tokens=48, max_model_len=300, **LAYOUTS[name])
    steps = ahead = in_vain = ended = preemptions = cached_tokens = 0
    for seed in range(6):
        draw = random.Random(seed)
        world = AheadWorld(sizes)
        be_busy(world, draw, [10, 80, 2, 3, 3, 1, 2])
        steps += world.steps
        ahead += world.ahead
        in_vain += sum(world.in_vain.values())
        ended += len(world.requests)
        preemptions += world.scheduler.stats().preemptions
        cached_tokens += world.scheduler.stats().cached_tokens
    assert ahead > steps / 3
    assert in_vain < ended
    assert preemptions > 0
    assert cached_tokens > 50
