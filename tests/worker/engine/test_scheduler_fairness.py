"""Nobody waits for ever: decode gaps, head of line, aging, quarantine."""

from collections.abc import Sequence

import pytest

from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.types import Slice, StepPlan
from tests.worker.engine.scheduler_world import World, config, request


class Clock:
    """A scheduler on a device whose steps take `a + b * tokens + c * attended keys` seconds."""

    def __init__(self, a: float, b: float, c: float, **settings: int) -> None:
        self.costs = a, b, c
        self.now = 0.0
        self.scheduler = Scheduler(config(page_size=16, num_pages=40_000, max_model_len=120_000, **settings))

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now)
        self.now += self.seconds(plan.slices)
        self.scheduler.complete(plan, {piece.handle: [5] for piece in plan.slices if piece.sample})
        return plan

    def seconds(self, slices: Sequence[Slice]) -> float:
        a, b, c = self.costs
        for piece in slices:
            rows = len(piece.token_ids)
            a += b * rows + c * (rows * piece.start + rows * (rows + 1) / 2)
        return a


# `a` is the time to read the weights, after which tokens cost arithmetic alone. The last device has no `a`.
DEVICES = {
    "gpu": ((20e-3, 10e-6, 10e-6 / 8192), {"max_step_tokens": 2048}),
    "costly attention": ((20e-3, 10e-6, 10e-6 / 1000), {"max_step_tokens": 2000, "keys_per_token": 1000}),
    "no attention": ((0.0, 1.0, 0.0), {"max_step_tokens": 64, "keys_per_token": 10**9}),
}


def prefill_among_streams(costs, settings):
    """How many times as long as without it a step takes at most; the chunks of a prefill of 100k tokens."""
    clock = Clock(*costs, max_running=33, **settings)
    for handle in range(32):
        clock.scheduler.add(request(handle, 16, max_tokens=20_000))
    while [len(piece.token_ids) for piece in clock.step().slices] != [1] * 32:
        pass
    clock.scheduler.add(request(99, 100_000, max_tokens=1))
    worst, chunks = 0.0, []
    while sum(chunks) < 100_000:
        before = clock.now
        *streams, chunk = clock.step().slices
        # Each stream has its token in every step, so a step is the time between two of its tokens.
        assert [piece.handle for piece in streams] == list(range(32))
        worst = max(worst, (clock.now - before) / clock.seconds(streams))
        chunks.append(len(chunk.token_ids))
    return worst, chunks


@pytest.mark.parametrize("device", DEVICES)
def test_decode_gap_during_a_prefill_of_100k_tokens(device):
    """Streams slow down by 2 at most, and the prefill has what that leaves."""
    costs, settings = DEVICES[device]
    worst, chunks = prefill_among_streams(costs, settings)
    assert 1.8 < worst <= 2
    # The last of the full chunks, with the keys that it attends to, uses most of the budget.
    assert chunks[-2] * (1 + 100_000 / settings.get("keys_per_token", 8192)) > 0.8 * (
        settings["max_step_tokens"] - 32
    )


def test_a_budget_blind_to_attention_would_stop_the_streams():
    """What the test above measures is there: chunks that count tokens alone take many times as long."""
    costs, settings = DEVICES["gpu"]
    worst, _ = prefill_among_streams(costs, settings | {"keys_per_token": 10**9})
    assert worst > 5


def test_a_prefill_alone_has_the_whole_budget():
    clock = Clock(*DEVICES["gpu"][0], max_running=4, max_step_tokens=2000)
    clock.scheduler.add(request(1, 100_000, max_tokens=1))
    assert [len(clock.step().slices[0].token_ids) for _ in range(50)] == [2000] * 50


@pytest.mark.parametrize("page_size", [16, 64, 128])
def test_tiny_prompts_cost_whole_pages(page_size):
    """Many prompts of one or two tokens: admission counts pages, so nothing is promised twice."""
    world = World(config(page_size=page_size, num_pages=10, max_running=64, max_step_tokens=256))
    for handle in range(40):
        world.add(request(handle, 1 + handle % 2, max_tokens=3))
    most = 0
    while world.has_work():
        world.step()
        most = max(most, world.scheduler.stats().running)
    assert most <= 10
    assert world.scheduler.stats().preemptions == 0
    assert len(world.finished) == 40
    world.check_outputs()


def busy(max_overtakes=32, **sizes):
    """A world with a stream of small requests: `arrive` adds one whenever fewer than 4 are there."""
    world = World(config(page_size=4, num_pages=40, max_running=8, max_overtakes=max_overtakes, **sizes))
    handles = iter(range(10_000))

    def arrive():
        small = [state for state in world.scheduler._requests.values() if state.limit < 60]
        for _ in range(4 - len(small)):
            world.add(request(next(handles), 16, max_tokens=12))

    return world, arrive


def test_a_large_request_neither_blocks_small_ones_nor_starves():
    world, arrive = busy(max_overtakes=10)
    arrive()
    world.step()
    # 90 % of the pool.
    world.add(request(20_000, 144, max_tokens=10))
    small_ones_done = 0
    while 20_000 not in world.cached:
        arrive()
        world.step()
        small_ones_done = len(world.finished)
        assert world.steps < 300, "the large request starves"
    assert small_ones_done >= 8, "the large request blocked the small ones"
    done_before = len(world.finished)
    for _ in range(80):
        arrive()
        world.step()
    assert 20_000 in world.finished
    assert len(world.finished) > done_before + 4
    world.drain()
    world.check_outputs()


def test_aging_counts_overtakers():
    world = World(config(page_size=4, num_pages=20, max_running=8, max_step_tokens=100, max_overtakes=3))
    world.add(request(1, 16, max_tokens=30))
    world.step()
    world.add(request(2, 75, max_tokens=2))
    for handle in range(3, 9):
        world.add(request(handle, 2, max_tokens=2))
    world.step()
    running = {state.request.handle for state in world.scheduler._running}
    assert running == {1, 3, 4, 5}
    world.drain()
    assert list(world.finished)[:4] == [3, 4, 5, 1]
    assert list(world.finished)[4] in (2, 6)
    world.check_outputs()


def test_without_overtaking_admission_is_first_come_first_served():
    world = World(config(page_size=4, num_pages=20, max_running=8, max_step_tokens=100, max_overtakes=0))
    world.add(request(1, 16, max_tokens=20))
    world.step()
    world.add(request(2, 70, max_tokens=2))
    world.add(request(3, 2, max_tokens=2))
    world.step()
    assert world.scheduler.stats().waiting == 2
    world.drain()
    assert next(iter(world.finished)) == 1


def test_a_request_that_fits_thanks_to_shared_pages_is_admitted():
    """Admission counts only what cannot be shared, also for a request that was looked at before."""
    world = World(config(page_size=4, num_pages=30, max_running=8, max_step_tokens=64))
    text = list(range(64))
    world.add(request(1, text, max_tokens=40))
    world.add(request(2, 30, max_tokens=10))
    world.add(request(3, text, max_tokens=2))
    for _ in range(30):
        world.step()
        if 3 in world.finished:
            break
    assert list(world.finished)[-1] == 3
    assert 1 not in world.finished
    world.drain()
    world.check_outputs()


def test_a_long_queue_is_looked_at_in_part():
    """A step's cost does not grow with the queue behind those that do not fit."""
    world = World(config(page_size=4, num_pages=20, max_running=8, max_overtakes=1000))
    world.add(request(0, 40, max_tokens=30))
    world.step()
    for handle in range(1, 200):
        world.add(request(handle, 70, max_tokens=1))
    looks = []
    need = world.scheduler._cache.need
    world.scheduler._cache.need = lambda tokens: looks.append(1) or need(tokens)
    for _ in range(16):
        world.step()
    assert len(looks) == 64


# ---- quarantine -------------------------------------------------------------------------------------


def kinds(world, steps):
    return ["q" if handles[0] >= 100 else "o" for handles in turns(world, steps)]


def turns(world, steps):
    return [world.step().handles for _ in range(steps)]


def test_quarantined_and_ordinary_steps_alternate():
    world = World(config())
    for handle in (1, 2):
        world.add(request(handle, 4, max_tokens=50))
    world.add(request(100, 4, max_tokens=20, quarantined=True))
    assert kinds(world, 8) == ["o", "q"] * 4
    assert world.cancel(100)
    assert kinds(world, 3) == ["o"] * 3


def test_a_quarantined_request_alone_runs_in_every_step():
    world = World(config())
    world.add(request(100, 4, max_tokens=5, quarantined=True))
    assert kinds(world, 5) == ["q"] * 5
    assert 100 in world.finished


def test_several_quarantined_requests_take_turns():
    world = World(config(max_step_tokens=8))
    world.add(request(1, 4, max_tokens=50))
    for handle in (100, 101, 102):
        world.add(request(handle, 20, max_tokens=20, quarantined=True))
    assert turns(world, 12) == [(1,), (100,), (1,), (101,), (1,), (102,)] * 2


def test_new_quarantined_requests_do_not_starve_an_old_one():
    world = World(config(max_running=4))
    world.add(request(100, 4, max_tokens=10, quarantined=True))
    for handle in range(101, 160):
        if 100 in world.finished:
            break
        world.add(request(handle, 4, max_tokens=1, quarantined=True))
        world.step()
    assert 100 in world.finished
    world.drain()
    assert handle < 130


def test_a_quarantined_request_also_takes_pages_from_younger_ones():
    world = World(config(page_size=4, num_pages=12, max_running=4))
    world.add(request(100, 16, max_tokens=30, quarantined=True))
    world.add(request(1, 16, max_tokens=30))
    world.drain(max_steps=200)
    assert world.scheduler.stats().preemptions
    assert list(world.finished) == [100, 1]
    world.check_outputs()


def test_an_ordinary_request_that_cannot_grow_does_not_stop_an_older_quarantined_one():
    """The ordinary one has no page left and may not take any: its turn goes to the other kind."""
    world = World(config(page_size=4, num_pages=9, max_running=4))
    world.add(request(100, 15, max_tokens=21, quarantined=True))
    world.step()
    world.add(request(1, 3, max_tokens=33))
    world.drain(max_steps=200)
    assert list(world.finished) == [100, 1]
    world.check_outputs()


def test_the_last_suspect_is_failed_alone():
    world = World(config())
    for handle in (1, 2):
        world.add(request(handle, 4, max_tokens=10))
    world.add(request(100, 4, max_tokens=10, quarantined=True))
    world.step()
    plan = world.begin()
    assert plan.handles == (100,)
    world.fail(plan)
    world.drain()
    assert sorted(world.finished) == [1, 2]
    world.check_outputs()


@pytest.mark.parametrize("spare", range(8))
def test_a_suspect_preempted_before_its_first_turn_holds_nothing(spare):
    """All its pages are shared with an older one, so that taking them away brings the taker nothing."""
    world = World(config(page_size=1, num_pages=12 + spare, growth_tokens=0))
    text = list(range(6))
    world.add(request(100, text, max_tokens=8, quarantined=True))
    world.add(request(101, 2, max_tokens=8, quarantined=True))
    world.add(request(1, 1, max_tokens=8))
    for _ in range(5):
        world.step()
    world.add(request(102, text, max_tokens=3, quarantined=True))
    world.drain()
    assert len(world.finished) == 4
    world.check_outputs()
