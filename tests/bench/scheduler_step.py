"""The scheduler's CPU time for each step, with 1, 64 and 512 requests that decode.

Run: python -m tests.bench.scheduler_step [--steps 400]
"""

import argparse
import statistics
import time

from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.limits import SchedulerConfig
from moebius_worker.engine.scheduler import Scheduler
from moebius_worker.engine.types import Request, SamplingParams

PROMPT = 1000
RUNNING = (1, 64, 512)


def layouts(running: int) -> dict[str, CacheLayout]:
    """Pages for all that run, for models with each kind of layers."""
    pages = 200 * running
    return {
        "full attention": CacheLayout(16, pages),
        "and a window of 128": CacheLayout(16, pages, window=128, num_window_pages=22 * running + 256),
        "and linear states": CacheLayout(16, pages, state_slots=3 * running),
    }


def step_seconds(layout: CacheLayout, running: int, steps: int) -> tuple[list[float], list[float]]:
    """Of each step, the CPU time of `schedule` and of `complete`."""
    scheduler = Scheduler(SchedulerConfig(layout, running, 4096, 1 << 20, 0))
    for handle in range(running):
        scheduler.add(
            Request(
                handle=handle,
                request_id=str(handle),
                token_ids=tuple(range(handle * PROMPT, (handle + 1) * PROMPT)),
                resumed=0,
                max_tokens=1 << 19,
                min_tokens=0,
                stop_token_ids=frozenset({-1}),
                sampling=SamplingParams(),
            )
        )
    planning: list[float] = []
    completing: list[float] = []
    while len(planning) < steps:
        begin = time.process_time()
        plan = scheduler.schedule(0.0)
        planned = time.process_time()
        sampled = {piece.handle: (7,) for piece in plan.slices if piece.sample}
        sampled_at = time.process_time()
        scheduler.complete(plan, sampled)
        if all(len(piece.token_ids) == 1 for piece in plan.slices) and len(plan.slices) == running:
            planning.append(planned - begin)
            completing.append(time.process_time() - sampled_at)
    return planning, completing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    print("microseconds a step   running   schedule   complete        sum   99 % below")
    for name in layouts(1):
        for running in RUNNING:
            planning, completing = step_seconds(layouts(running)[name], running, steps)
            sums = [first + second for first, second in zip(planning, completing, strict=True)]
            figures = [
                *map(statistics.median, (planning, completing, sums)),
                statistics.quantiles(sums, n=100)[-1],
            ]
            print(f"{name:<20} {running:>9}" + "".join(f"{figure * 1e6:>11.0f}" for figure in figures))


if __name__ == "__main__":
    main()
