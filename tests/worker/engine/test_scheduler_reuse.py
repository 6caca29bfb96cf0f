"""Prefix cache and preemption as requests see them."""

import pytest

from tests.worker.engine.scheduler_world import World, config, request

# ---- prefix cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_cached_prompt_costs_less_than_a_page(page_size):
    world = World(config(page_size=page_size, num_pages=2048 // page_size, max_step_tokens=2048))
    text = list(range(500))
    world.add(request(1, text, max_tokens=1))
    world.drain()
    assert world.cached[1] == 0
    world.add(request(2, text, max_tokens=1))
    plan = world.step()
    assert len(plan.slices[0].token_ids) <= page_size
    assert world.cached[2] == 499 // page_size * page_size
    assert world.scheduler.stats().cached_tokens == world.cached[2]
    world.check_outputs()


def test_the_next_turn_finds_prompt_and_answer():
    world = World(config(page_size=4))
    text = list(range(10))
    world.add(request(1, text, max_tokens=11))
    world.drain()
    turn = [*text, *world.outputs(1), 77, 78, 79]
    world.add(request(2, turn, max_tokens=1))
    world.drain()
    # 10 + 11 tokens, of which the last was never computed.
    assert world.cached[2] == 20


def test_cached_tokens_are_reported_once_and_of_the_prompt_only():
    world = World(config(page_size=4))
    text = list(range(20))
    world.add(request(1, text, max_tokens=1))
    world.drain()
    world.add(request(2, text, resumed=10, max_tokens=20))
    world.drain()
    assert world.cached[2] == 10


def test_twins_share_while_they_run():
    """The same long prompt twice at once: the second one skips what the first has done by then."""
    world = World(config(page_size=4, num_pages=400, max_step_tokens=30, max_running=4))
    text = list(range(200))
    for handle in (1, 2, 3):
        world.add(request(handle, text, max_tokens=8))
    world.step()
    assert world.scheduler.stats().running == 3
    world.drain()
    world.check_outputs()
    assert sum(world.work.values()) < 300
    assert world.cached[1] == 0
    assert min(world.cached[2], world.cached[3]) >= 150


def test_a_preempted_request_does_not_report_its_own_work_as_cached():
    world = World(config(page_size=4, num_pages=16, max_running=4, max_step_tokens=64))
    world.add(request(1, 20, max_tokens=40))
    world.add(request(2, 16, max_tokens=40))
    world.drain()
    assert world.scheduler.stats().preemptions
    assert world.restarts
    assert world.cached == {1: 0, 2: 0}
    assert world.scheduler.stats().cached_tokens == 0
    world.check_outputs()


# ---- preemption -------------------------------------------------------------------------------------


def test_the_latest_arrival_is_preempted_and_keeps_its_output():
    world = World(config(page_size=4, num_pages=28, max_running=8, max_step_tokens=64))
    for handle in range(4):
        world.add(request(handle, 10, max_tokens=40))
    first_lost = None
    while world.has_work():
        world.step()
        if first_lost is None and world.scheduler.stats().preemptions:
            (lost,) = (state.request.handle for state in world.scheduler._waiting)
            first_lost = lost
            assert world.scheduler.history(lost).output_ids
    assert first_lost == 3
    # The oldest was never disturbed: it is done first.
    assert next(iter(world.finished)) == 0
    world.check_outputs()


def test_a_preempted_request_goes_before_later_ones():
    world = World(config(page_size=4, num_pages=12, max_running=2, max_step_tokens=64))
    for handle in range(4):
        world.add(request(handle, 16, max_tokens=16))
    while not world.scheduler.stats().preemptions:
        world.step()
    assert [state.request.handle for state in world.scheduler._waiting] == [1, 2, 3]
    world.drain()
    assert list(world.finished) == [0, 1, 2, 3]
    world.check_outputs()


def test_no_livelock_when_nothing_fits_together():
    """Each of four requests needs nearly all pages: they end one after the other, in order."""
    world = World(config(page_size=4, num_pages=16, max_running=4, max_step_tokens=16))
    for handle in range(4):
        world.add(request(handle, 30, max_tokens=30))
    world.drain(max_steps=400)
    assert list(world.finished) == [0, 1, 2, 3]
    world.check_outputs()
