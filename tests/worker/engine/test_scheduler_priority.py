"""Who goes first: priorities, and deadlines."""

import pytest

from moebius_worker.engine.limits import MAX_PRIORITY
from moebius_worker.engine.types import Rejected
from tests.worker.engine.scheduler_world import World, config, request


def finishing_order(world):
    world.drain()
    world.check_outputs()
    return list(world.finished)


def test_the_more_urgent_is_admitted_first_and_among_equals_the_older():
    world = World(config(max_running=1))
    for handle, priority in ((1, 0), (2, 5), (3, 0), (4, -1), (5, 5), (6, -1)):
        world.add(request(handle, 10, priority=priority))
    assert finishing_order(world) == [4, 6, 1, 3, 2, 5]


def test_the_least_urgent_is_preempted_then_the_youngest():
    world = World(config(page_size=4, num_pages=28, max_running=8, max_step_tokens=64))
    for handle, priority in ((1, 1), (2, 0), (3, 1), (4, 0)):
        world.add(request(handle, 10, max_tokens=40, priority=priority))
    lost = []
    while world.has_work():
        world.step()
        for state in world.scheduler._waiting:
            if state.request.handle not in lost:
                lost.append(state.request.handle)
    assert lost[:2] == [3, 1]
    # Who was preempted kept its place.
    assert list(world.finished)[:3] == [2, 4, 1]
    world.check_outputs()


def test_a_request_never_takes_pages_from_a_more_urgent_younger_one():
    world = World(config(page_size=4, num_pages=12, max_running=4, max_step_tokens=64))
    world.add(request(1, 10, max_tokens=30, priority=1))
    world.step()
    world.add(request(2, 10, max_tokens=30))
    assert finishing_order(world) == [2, 1]
    assert world.scheduler.stats().preemptions == 1


def test_a_stream_of_urgent_requests_does_not_starve_the_others():
    world = World(config(max_running=2, max_waiting=8, num_pages=40))
    world.add(request(10_000, 30, max_tokens=10, priority=3))
    urgent = iter(range(10_000))
    while 10_000 not in world.finished:
        while world.scheduler.stats().waiting < 6:
            world.add(request(next(urgent), 10, max_tokens=3, priority=0))
        world.step()
        assert world.steps < 500, "the less urgent request starves"
    # Three times, a queue full of others went first.
    assert len(world.finished) >= 3 * 8
    world.drain()
    world.check_outputs()


def test_an_urgent_prefill_has_half_the_budget_but_not_all():
    world = World(config(num_pages=1000, max_step_tokens=64))
    world.add(request(1, 1000, max_tokens=1))
    world.step()
    world.add(request(2, 1000, max_tokens=1, priority=-1))
    world.add(request(3, 40, max_tokens=1, priority=1))
    plan = world.step()
    assert [(piece.handle, len(piece.token_ids)) for piece in plan.slices] == [(2, 32), (3, 32)]
    world.drain()


@pytest.mark.parametrize("priority", [MAX_PRIORITY + 1, -MAX_PRIORITY - 1, 10**9])
def test_priorities_have_bounds(priority):
    world = World(config())
    with pytest.raises(Rejected, match="priority") as refusal:
        world.add(request(1, 5, priority=priority))
    assert refusal.value.reason == "BAD_REQUEST"
    world.add(request(1, 5, priority=MAX_PRIORITY))
    world.drain()


# ---- deadlines --------------------------------------------------------------------------------------


def test_a_waiting_request_ends_at_its_deadline_without_being_computed():
    world = World(config(max_running=1))
    world.add(request(1, 10, max_tokens=10))
    world.add(request(2, 10, deadline=5.0))
    world.add(request(3, 10, deadline=50.0))
    while world.has_work():
        # `World` sees to the reason, and that nothing was computed.
        plan = world.step()
        assert [handle for handle, _ in plan.refused] == ([2] if world.now == 5.0 else [])
        world.now += 1.0
    assert world.expired == [2]
    assert sorted(world.finished) == [1, 3]
    world.check_outputs()


def test_a_deadline_that_is_past_on_arrival():
    world = World(config())
    world.now = 7.0
    world.add(request(1, 10, deadline=6.9))
    plan = world.step()
    assert plan.slices == ()
    assert [(handle, refusal.reason) for handle, refusal in plan.refused] == [(1, "DEADLINE")]
    assert not world.has_work()
    # Its handle is free again.
    world.add(request(1, 10, deadline=8.0))
    world.drain()
    assert list(world.finished) == [1]


def test_what_has_begun_goes_on_past_its_deadline():
    """Also when it was preempted: its client has had a part of the text."""
    world = World(config(page_size=4, num_pages=12, max_running=4, max_step_tokens=64))
    for handle in (1, 2):
        world.add(request(handle, 10, max_tokens=30, deadline=1.0))
    world.step()
    world.now = 2.0
    world.drain()
    assert world.scheduler.stats().preemptions
    assert sorted(world.finished) == [1, 2]


def test_cancelled_requests_leave_no_deadline():
    world = World(config(max_running=1))
    world.add(request(1, 10, max_tokens=20))
    world.step()
    world.add(request(2, 10, deadline=3.0))
    world.cancel(2)
    world.add(request(3, 10, deadline=4.0))
    world.now = 3.5
    assert world.step().refused == ()
    world.now = 4.0
    assert [handle for handle, _ in world.step().refused] == [3]
    world.drain()
