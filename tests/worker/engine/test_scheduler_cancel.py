"""Requests that end early: cancelled at any moment, or failed with a step."""

import pytest

from tests.worker.engine.scheduler_world import World, config, request


def test_cancel_in_every_phase_frees_everything():
    world = World(config(max_step_tokens=8, max_running=2))
    world.add(request(1, 4, max_tokens=100))
    world.step()
    world.add(request(2, 50, max_tokens=100))
    world.step()
    world.add(request(3, 4, max_tokens=100))
    assert world.scheduler.stats().waiting == 1
    for handle in (3, 2, 1):
        assert world.cancel(handle)
        assert not world.cancel(handle)
    assert not world.has_work()
    assert world.scheduler.stats().cache.pages_used == 0
    assert not world.cancel(99)


def test_cancel_during_a_step_keeps_the_pages_until_its_end():
    world = World(config(max_step_tokens=8))
    world.add(request(1, 20, max_tokens=5))
    world.add(request(2, 3, max_tokens=5))
    plan = world.begin()
    assert set(plan.handles) == {1, 2}
    used = world.scheduler.stats().cache.pages_used
    assert world.cancel(1)
    assert world.cancel(2)
    assert not world.cancel(1)
    assert world.scheduler.stats().cache.pages_used == used
    assert world.scheduler.history(2).output_ids == []
    assert not world.has_work()
    assert world.end(plan) == []
    assert world.scheduler.stats().cache.pages_used == 0
    with pytest.raises(KeyError):
        world.scheduler.history(2)


def test_a_cancelled_request_leaves_its_place_at_once():
    """The next one is not delayed, whichever phase the request was in."""
    world = World(config(max_running=1))
    world.add(request(1, 20, max_tokens=1000))
    world.add(request(2, 20, max_tokens=1))
    world.step(during=lambda _: world.cancel(1))
    world.step()
    assert list(world.finished) == [2]


def test_a_failed_step_takes_only_its_requests_and_leaves_no_page_behind():
    world = World(config(max_step_tokens=8, max_running=3, num_pages=30, page_size=4))
    text = list(range(40))
    world.add(request(1, text, max_tokens=5))
    world.step()
    world.add(request(2, 8, max_tokens=5, quarantined=True))
    assert world.step().handles == (2,)
    plan = world.begin()
    assert plan.handles == (1,)
    world.fail(plan)
    assert world.scheduler.stats().cache.pages_cached == 2
    # What the failed step wrote is computed again; what was there before is found.
    world.add(request(3, text, max_tokens=5))
    world.drain()
    assert world.cached[3] == 8
    assert sorted(world.finished) == [2, 3]
    world.check_outputs()


def test_failing_a_waiting_or_unknown_or_cancelled_request():
    world = World(config(max_running=1))
    world.add(request(1, 5))
    world.add(request(2, 5))
    plan = world.begin()
    world.cancel(1)
    world.scheduler.fail([1, 2, 3, 1])
    world._drop(1), world._drop(2)
    world.audit()
    assert world.scheduler.complete(plan, {}) == []
    assert not world.has_work()
    assert world.scheduler.stats().cache.pages_used == 0
