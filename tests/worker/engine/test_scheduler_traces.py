"""Random lives of a scheduler, each step checked by `World` and every output compared with a quiet run."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_worker.engine.scheduler import Rejected
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
        length = draw.choice([1, 2, draw.randint(1, 12), draw.randint(1, longest)])
        family = draw.randrange(3)
        common = draw.randint(0, length)
        tokens = [family * 7 + i % 5 for i in range(common)]
        tokens += [draw.randrange(30) for _ in range(length - common)]
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
                )
            )
            self.steps_needed += length + self.max_output
        except Rejected:
            return

    def cancel(self, index: int | None) -> None:
        live = sorted(self.world.scheduler._requests)
        if live:
            handle = live[(index or 0) % len(live)]
            fresh = not self.world.scheduler._requests[handle].cancelled
            assert self.world.cancel(handle) == fresh
            assert not self.world.cancel(handle)

    def finish(self) -> None:
        self.world.drain(max_steps=100 + 4 * self.steps_needed)
        self.world.check_outputs()


@settings(max_examples=300, deadline=None)
@given(
    operations=OPERATIONS,
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_pages=st.integers(1, 24),
    max_running=st.integers(1, 6),
    max_step_tokens=st.integers(1, 24),
    max_overtakes=st.integers(0, 4),
    growth_tokens=st.sampled_from([0, 0, 3, 16]),
    speculated=st.sampled_from([1, 1, 3]),
)
def test_any_trace_keeps_every_rule(operations, speculated, **sizes):
    trace = Trace(World(config(max_waiting=10, **sizes), speculated), max_prompt=40, max_output=30)
    for operation, argument in operations:
        trace.apply(operation, argument)
    trace.finish()


@pytest.mark.parametrize(
    ("page_size", "num_pages", "max_prompt"), [(1, 200, 40), (16, 20, 40), (64, 12, 200)]
)
def test_long_busy_traces(page_size, num_pages, max_prompt):
    """More work than pages, for some hundred steps: preemption, eviction and sharing all happen."""
    sizes = config(
        page_size=page_size, num_pages=num_pages, max_running=12, max_step_tokens=48, max_model_len=300
    )
    finished = preemptions = cached_tokens = 0
    for seed in range(4):
        draw = random.Random(seed)
        trace = Trace(World(sizes), max_prompt, max_output=200)
        for _ in range(150):
            operation = draw.choices(
                ["add", "step", "cancel", "step and cancel", "step and add", "fail", "fail one"],
                [30, 60, 3, 3, 5, 1, 2],
            )[0]
            trace.apply(operation, 1 if operation == "step" else draw.randrange(2**32))
        trace.finish()
        finished += len(trace.world.finished)
        preemptions += trace.world.scheduler.stats().preemptions
        cached_tokens += trace.world.scheduler.stats().cached_tokens
    assert finished > 100
    assert preemptions > 3
    assert cached_tokens > 0
