"""What a scheduler promises, one thing a test. `World` checks the accounting in every step besides."""

import pytest

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.types import Finish, Rejected, StepPlan
from tests.worker.engine.scheduler_world import STOP, World, config, expected_output, request


def rejection(world, asked):
    with pytest.raises(Rejected) as caught:
        world.scheduler.add(asked)
    return caught.value


# ---- a request's life -------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_prefill_then_decode_then_finish(page_size):
    world = World(config(page_size=page_size))
    world.add(request(1, 10, max_tokens=3))
    plan = world.step()
    (piece,) = plan.slices
    assert (piece.start, piece.end, piece.sample) == (0, 10, True)
    plan = world.step()
    (piece,) = plan.slices
    assert (piece.start, piece.end, piece.sample) == (10, 11, True)
    world.step()
    assert world.finished == {1: Finish.LENGTH}
    assert not world.has_work()
    assert world.step().slices == ()
    world.check_outputs()


def test_stop_token_ends_and_is_delivered():
    scheduler = Scheduler(config())
    scheduler.add(request(1, 5, max_tokens=10, stop=frozenset({7, 8})))
    assert [o.finish for o in scheduler.complete(scheduler.schedule(0), {1: [3]})] == [None]
    (output,) = scheduler.complete(scheduler.schedule(0), {1: [8]})
    assert (output.token_ids, output.finish) == ((8,), Finish.STOP)


def test_stop_token_on_the_last_token_is_a_stop():
    scheduler = Scheduler(config())
    scheduler.add(request(1, 5, max_tokens=1, stop=STOP))
    (output,) = scheduler.complete(scheduler.schedule(0), {1: [0]})
    assert output.finish is Finish.STOP


def test_below_min_tokens_a_stop_token_does_not_end():
    scheduler = Scheduler(config())
    scheduler.add(request(1, 5, max_tokens=10, min_tokens=2, stop=STOP))
    finishes = [scheduler.complete(scheduler.schedule(0), {1: [0]})[0].finish for _ in range(3)]
    assert finishes == [None, None, Finish.STOP]


def test_max_tokens_beyond_the_context_is_cut():
    world = World(config(max_model_len=20))
    world.add(request(1, 15, max_tokens=1_000_000))
    world.drain()
    assert len(world.outputs(1)) == 5
    assert world.finished[1] is Finish.LENGTH


def test_max_tokens_beyond_the_pool_is_cut():
    world = World(config(num_pages=5, page_size=4))
    world.add(request(1, 15, max_tokens=1_000_000))
    world.drain()
    assert len(world.outputs(1)) == 5
    assert world.finished[1] is Finish.LENGTH


def test_resumed_tokens_count_as_output():
    world = World(config())
    asked = request(1, 10, max_tokens=12, min_tokens=9, stop=STOP)
    whole, finish = expected_output(asked, 10_000)
    for resumed in range(1, len(whole)):
        handle = 100 + resumed
        continued = request(
            handle,
            [*asked.token_ids, *whole[:resumed]],
            max_tokens=12,
            min_tokens=9,
            stop=STOP,
            resumed=resumed,
        )
        world.add(continued)
        history = world.scheduler.history(handle)
        assert (history.prompt_ids, history.output_ids) == (asked.token_ids, whole[:resumed])
        world.drain()
        assert (world.outputs(handle), world.finished[handle]) == (whole, finish)


def test_history_follows_the_output():
    scheduler = Scheduler(config())
    asked = request(1, [5, 6, 7, 8], max_tokens=10, resumed=1)
    scheduler.add(asked)
    history = scheduler.history(1)
    scheduler.complete(scheduler.schedule(0), {1: [9]})
    assert (history.prompt_ids, history.output_ids, history.request) == ((5, 6, 7), [8, 9], asked)


def test_speculated_tokens_are_taken_to_the_first_end():
    scheduler = Scheduler(config())
    scheduler.add(request(1, 5, max_tokens=10, stop=STOP))
    (output,) = scheduler.complete(scheduler.schedule(0), {1: [3, 4]})
    assert (output.token_ids, output.finish) == ((3, 4), None)
    (piece,) = scheduler.schedule(0).slices
    assert (piece.start, piece.token_ids, piece.sample) == (5, (3, 4), True)
    (output,) = scheduler.complete(scheduler._plan, {1: [5, 0, 6]})
    assert (output.token_ids, output.finish) == ((5, 0), Finish.STOP)

    scheduler.add(request(2, 5, max_tokens=2))
    (output,) = scheduler.complete(scheduler.schedule(0), {2: [3, 4, 5]})
    assert (output.token_ids, output.finish) == ((3, 4), Finish.LENGTH)


# ---- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(1, []), "BAD_REQUEST"),
        (request(1, 3, max_tokens=10, resumed=3), "BAD_REQUEST"),
        (request(1, 3, max_tokens=10, resumed=-1), "BAD_REQUEST"),
        (request(1, 3, max_tokens=0), "BAD_REQUEST"),
        (request(1, 10, max_tokens=4, resumed=4), "BAD_REQUEST"),
        (request(1, 100), "BAD_REQUEST"),
        (request(1, 99), "KV_EXHAUSTED"),
        (request(1, 64), "KV_EXHAUSTED"),
    ],
)
def test_what_can_never_run_is_refused_at_once(asked, reason):
    world = World(config(num_pages=16, page_size=4, max_model_len=100))
    assert rejection(world, asked).reason == reason
    assert not world.has_work()
    # The longest that fits does run.
    world.add(request(1, 63, max_tokens=100))
    world.drain()
    assert len(world.outputs(1)) == 1


def test_a_handle_in_use_is_refused():
    world = World(config())
    world.add(request(1, 3))
    assert rejection(world, request(1, 4)).reason == "BAD_REQUEST"
    plan = world.begin()
    world.cancel(1)
    # The step with it is still under way: another request by this name would get its tokens.
    assert rejection(world, request(1, 4)).reason == "BAD_REQUEST"
    world.end(plan)
    world.add(request(1, 4, max_tokens=2))
    world.drain()
    assert len(world.outputs(1)) == 2


def test_a_full_queue_refuses():
    world = World(config(max_running=2, max_waiting=3))
    for handle in range(5):
        world.add(request(handle, 5))
    assert rejection(world, request(5, 5)).reason == "OVERLOADED"
    world.step()
    assert rejection(world, request(5, 5)).reason == "OVERLOADED"
    # What cannot run at all is told so, not asked to come again.
    assert rejection(world, request(5, 100_000)).reason == "BAD_REQUEST"
    world.cancel(3)
    world.add(request(6, 5))
    world.drain()
    assert sorted(world.finished) == [0, 1, 2, 4, 6]


@pytest.mark.parametrize(
    "name",
    [
        "page_size",
        "num_pages",
        "max_running",
        "max_step_tokens",
        "max_model_len",
        "snapshot_interval",
        "keys_per_token",
    ],
)
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        config(**{name: 0})


def test_settings_of_the_queue_are_checked():
    with pytest.raises(ValueError, match="max_waiting must not be negative"):
        SchedulerConfig(CacheLayout(1, 1), 1, 1, 1, -1)


# ---- batching ---------------------------------------------------------------------------------------


def test_prefill_is_cut_into_chunks_and_only_the_last_one_samples():
    world = World(config(max_step_tokens=7))
    world.add(request(1, 20, max_tokens=1))
    slices = [world.step().slices[0] for _ in range(3)]
    assert [(piece.start, piece.end, piece.sample) for piece in slices] == [
        (0, 7, False),
        (7, 14, False),
        (14, 20, True),
    ]
    world.drain()


def test_a_long_prompt_does_not_stop_the_streams_nor_short_prompts():
    world = World(config(num_pages=1000, max_step_tokens=16, max_running=8))
    for handle in range(4):
        world.add(request(handle, 4, max_tokens=200))
    world.step()
    world.add(request(9, 1500, max_tokens=1))
    world.step()
    world.add(request(10, 4, max_tokens=1))
    world.step()
    assert 10 in world.finished
    for _ in range(50):
        plan = world.step()
        assert {0, 1, 2, 3, 9} == set(plan.handles)
        # The prefill has all the rest, save what its attention costs.
        assert sum(len(piece.token_ids) for piece in plan.slices) in (15, 16)


def test_no_more_run_than_places():
    world = World(config(max_running=3, num_pages=100))
    for handle in range(10):
        world.add(request(handle, 5, max_tokens=5))
    while world.has_work():
        world.step()
        assert world.scheduler.stats().running <= 3
    assert len(world.finished) == 10


def test_more_places_than_tokens_in_a_step():
    """Every running request can decode in every step, so fewer run."""
    world = World(config(max_running=8, max_step_tokens=3, num_pages=100))
    for handle in range(8):
        world.add(request(handle, 1, max_tokens=10))
    while world.has_work():
        plan = world.begin()
        assert len(plan.slices) == world.scheduler.stats().running
        world.end(plan)
    assert len(world.finished) == 8


def test_admission_leaves_what_a_running_prefill_still_needs():
    world = World(config(page_size=4, num_pages=30, max_step_tokens=8))
    world.add(request(1, 80, max_tokens=1))
    world.step()
    world.add(request(2, 60, max_tokens=1))
    world.step()
    assert world.scheduler.stats().cache.pages_used == 4
    assert world.scheduler.stats().waiting == 1
    world.drain()
    assert world.scheduler.stats().preemptions == 0


def test_admission_leaves_running_requests_a_little_growth():
    """A request that would be preempted after a few steps is not admitted."""
    world = World(config(page_size=4, num_pages=11))
    world.add(request(1, 16, max_tokens=10))
    world.step()
    world.add(request(2, 24, max_tokens=12))
    world.drain()
    assert world.scheduler.stats().preemptions == 0
    assert list(world.finished) == [1, 2]


def test_eight_requests_without_max_tokens_run_at_once():
    """Pages are not reserved for outputs that may never come."""
    world = World(config(page_size=16, num_pages=64, max_model_len=1024, max_step_tokens=1024))
    for handle in range(8):
        world.add(request(handle, 20, max_tokens=32_768))
    world.step()
    assert world.scheduler.stats().running == 8
    assert world.scheduler.stats().cache.pages_used == 16


# ---- the order of calls -----------------------------------------------------------------------------


def test_one_step_at_a_time():
    scheduler = Scheduler(config())
    scheduler.add(request(1, 5))
    plan = scheduler.schedule(0)
    with pytest.raises(RuntimeError, match="not complete"):
        scheduler.schedule(0)
    with pytest.raises(RuntimeError, match="not that of the step under way"):
        scheduler.complete(StepPlan(plan.slices), {1: [2]})
    with pytest.raises(ValueError, match="no token was sampled for request 1"):
        scheduler.complete(plan, {})
    assert scheduler.complete(plan, {1: [2]})
    # Nothing is left of the step: completing it again has no effect.
    assert scheduler.complete(plan, {1: [2]}) == []
    assert scheduler.history(1).output_ids == [2]


def test_an_empty_plan_needs_no_completion():
    scheduler = Scheduler(config())
    assert scheduler.schedule(0).slices == ()
    assert scheduler.complete(scheduler.schedule(0), {}) == []
