"""Random lives of a scheduler, each step checked by `World` and every output compared with a quiet run."""

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.types import Rejected
from tests.worker.engine.scheduler_world import STOP, World, config, request

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2**32)),
        st.tuples(st.just("add"), st.integers(0, 2**32)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 100)),
        st.tuples(st.just("step and cancel"), st.integers(0, 100)),
        st.tuples(st.just("step and add"), st.integers(0, 2**32)),
        st.tuples(st.just("fail"), st.none()),
        st.tuples(st.just("fail one"), st.integers(0, 100)),
    ),
    min_size=12,
    max_size=60,
)


class Trace:
    """Applies operations to a world. Requests come from a few families of texts, so that prefixes meet."""

    def __init__(self, world: World, max_prompt: int, max_output: int) -> None:
        self.world = world
        self.max_prompt = max_prompt
        self.max_output = max_output
        self.handles = 0
        self.steps_needed = 0

    def apply(self, operation: str, argument: int | None) -> None:
        world = self.world
        if operation == "add":
            self.add(argument)
        elif operation == "step":
            for _ in range(argument or 0):
                world.step()
        elif operation == "cancel":
            self.cancel(argument)
        elif operation == "step and cancel":
            world.step(during=lambda _: self.cancel(argument))
        elif operation == "step and add":
            world.step(during=lambda _: self.add(argument))
        elif operation == "fail":
            world.fail(world.begin())
        elif operation == "fail one":
            plan = world.begin()
            handles = plan.handles
            world.end(plan, failed=[handles[(argument or 0) % len(handles)]] if handles else [])

    def add(self, seed: int | None) -> None:
        draw = random.Random(seed)
        handle, self.handles = self.handles, self.handles + 1
        longest = self.world.limit if draw.random() < 0.1 else self.max_prompt
        length = draw.choice([1, 2, draw.randint(1, 12), *[draw.randint(1, longest)] * 2])
        tokens = self.text(draw, length)
        resumed = draw.choice([0, 0, draw.randint(0, length - 1)])
        try:
            self.world.add(
                request(
                    handle,
                    tokens,
                    max_tokens=resumed + draw.randint(1, self.max_output),
                    resumed=resumed,
                    min_tokens=draw.choice([0, 0, 5, resumed + 3]),
                    stop=draw.choice([frozenset(), STOP]),
                    quarantined=draw.random() < 0.15,
                    priority=draw.choice([0, 0, 0, 1, -1, 2]),
                    deadline=draw.choice([None, None, self.world.now + draw.randint(0, 60)]),
                )
            )
            self.steps_needed += length + self.max_output
        except Rejected:
            return

    def text(self, draw: random.Random, length: int) -> list[int]:
        """Of one of three families up to some token, or the next turn of a conversation that has ended."""
        earlier = list(self.world.conversations.values())
        if earlier and draw.random() < 0.4:
            start = draw.choice(earlier)[: length - 1]
        else:
            family = draw.randrange(3)
            start = [family * 7 + i % 5 for i in range(draw.choice([length, draw.randint(0, length)]))]
        return [*start, *(draw.randrange(30) for _ in range(length - len(start)))]

    def cancel(self, index: int | None) -> None:
        live = sorted(self.world.scheduler._requests)
        if live:
            handle = live[(index or 0) % len(live)]
            fresh = not self.world.scheduler._requests[handle].over
            assert self.world.cancel(handle) == fresh
            assert not self.world.cancel(handle)

    def finish(self) -> None:
        self.world.drain(max_steps=100 + 4 * self.steps_needed)
        self.world.check_outputs()


def window_and_slots(page_size, num_pages, max_running, draw):
    """Sizes of the side pools: none, or from the least that can work to more than is needed."""
    sizes = {}
    kind = draw.choice(["", "window", "state", "both"])
    if kind in ("window", "both"):
        window = draw.choice([1, 2, 3, 7, 16, 40])
        least = CacheLayout(page_size, num_pages, window, 10**6).window_reach
        sizes |= {"window": window, "num_window_pages": least + draw.choice([0, 1, 3, 10, 60])}
    if kind in ("state", "both"):
        sizes |= {"state_slots": draw.choice([1, 2, max_running, max_running + 3, 40])}
        sizes |= {"snapshot_interval": draw.choice([1, 4, 9, 512])}
    return sizes


@settings(max_examples=400, deadline=None)
@given(
    operations=OPERATIONS,
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_pages=st.integers(1, 24),
    max_running=st.integers(1, 6),
    max_step_tokens=st.integers(1, 24),
    max_overtakes=st.integers(0, 4),
    growth_tokens=st.sampled_from([0, 0, 3, 16]),
    speculated=st.sampled_from([1, 1, 3]),
    seed=st.integers(0, 2**32),
)
def test_any_trace_keeps_every_rule(operations, speculated, seed, **sizes):
    draw = random.Random(seed)
    sizes |= window_and_slots(sizes["page_size"], sizes["num_pages"], sizes["max_running"], draw)
    trace = Trace(World(config(max_waiting=10, **sizes), speculated), max_prompt=40, max_output=30)
    for operation, argument in operations:
        trace.apply(operation, argument)
    trace.finish()


# The number of steps in all of these is 10^5 when the environment asks for it.
STEPS = 100_000 if os.environ.get("MOEBIUS_LONG_TRACES") else 10_000
LAYOUTS = {
    "full, small pages": {"page_size": 1, "num_pages": 200},
    "full": {"page_size": 16, "num_pages": 20},
    "full and window": {"page_size": 4, "num_pages": 60, "window": 10, "num_window_pages": 60},
    "full and tight window": {"page_size": 8, "num_pages": 24, "window": 20, "num_window_pages": 20},
    "full and state": {"page_size": 4, "num_pages": 60, "state_slots": 24, "snapshot_interval": 8},
    "full and few slots": {"page_size": 4, "num_pages": 60, "state_slots": 7, "snapshot_interval": 16},
    "window and state": {
        "page_size": 4,
        "num_pages": 60,
        "window": 9,
        "num_window_pages": 60,
        "state_slots": 20,
        "snapshot_interval": 12,
    },
}


def be_busy(world: World, draw: random.Random, weights: list[int]) -> None:
    """A long trace with more work than pages; `weights`: how often each operation comes."""
    trace = Trace(world, max_prompt=60, max_output=150)
    for _ in range(150):
        operation = draw.choices(
            ["add", "step", "cancel", "step and cancel", "step and add", "fail", "fail one"], weights
        )[0]
        trace.apply(operation, 1 if operation == "step" else draw.randrange(2**32))
        world.now += 1
    trace.finish()


@pytest.mark.parametrize("name", LAYOUTS)
def test_long_busy_traces(name):
    """More work than pages, for long: preemption, eviction and sharing all happen."""
    sizes = config(max_running=12, max_step_tokens=48, max_model_len=300, **LAYOUTS[name])
    steps = finished = preemptions = cached_tokens = expired = seed = 0
    while steps < STEPS / len(LAYOUTS):
        draw = random.Random(seed)
        seed += 1
        world = World(sizes, speculated=1 + seed % 2)
        be_busy(world, draw, [30, 60, 3, 3, 5, 1, 2])
        steps += world.steps
        finished += len(world.finished)
        expired += len(world.expired)
        preemptions += world.scheduler.stats().preemptions
        cached_tokens += world.scheduler.stats().cached_tokens
    assert finished > 50
    assert expired > 3
    assert preemptions > 3
    assert cached_tokens > 50
