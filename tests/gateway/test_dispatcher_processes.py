"""Workers as processes, killed and stopped with real signals in mid-stream."""

import asyncio
import signal
import time
from contextlib import AsyncExitStack, suppress

import pytest

from moebius_gateway.types import GenerationError, Reason
from moebius_gateway.workers.dispatcher import DispatcherOptions
from tests.gateway.dispatching import Gateway, Process, Seen, consume, gateway, generation, process
from tests.gateway.worker_standin import undisturbed
from tests.timed import same
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.timed

COUNT = 16
# More than are waited for: workers go on while this process does not get its turn.
MAX_TOKENS = 600
ENOUGH = 60


async def started(
    stack: AsyncExitStack, count: int, *arguments: str, silence: float = 2 * PATIENCE
) -> tuple[Gateway, list[Process]]:
    """With a `silence` that finds no death, unless a test wants it to."""
    workers = await asyncio.gather(
        *(stack.enter_async_context(process("--rate", "60", *arguments)) for _ in range(count))
    )
    built = await stack.enter_async_context(
        gateway(*(worker.port for worker in workers), silence_timeout=silence)
    )
    await until(lambda: all(view.model for view in built.workers()))
    return built, list(workers)


async def begin(built: Gateway) -> list[tuple[Seen, asyncio.Task[Seen]]]:
    begun = []
    for seed in range(COUNT):
        seen = Seen()
        wanted = generation(seed=seed, max_tokens=MAX_TOKENS)
        begun.append((seen, asyncio.create_task(consume(built, wanted, seen))))
    await until(lambda: all(len(seen.tokens) > 5 for seen, _ in begun))
    return begun


async def finish(built: Gateway, begun: list[tuple[Seen, asyncio.Task[Seen]]]) -> None:
    await until(lambda: all(task.done() or len(seen.tokens) >= ENOUGH for seen, task in begun))
    for seed, (seen, task) in enumerate(begun):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert len(seen.tokens) >= ENOUGH
        same(tuple(seen.tokens), undisturbed((5, 6, 7), seed, len(seen.tokens)))
    assert built.idle()


async def test_kill_with_a_second_worker() -> None:
    async with AsyncExitStack() as stack:
        built, workers = await started(stack, 2)
        begun = await begin(built)
        before = [len(seen.tokens) for seen, _ in begun]
        workers[0].child.kill()
        killed = time.monotonic()
        await until(lambda: all(len(seen.tokens) > n + 2 for (seen, _), n in zip(begun, before, strict=True)))
        assert time.monotonic() - killed < 5
        await finish(built, begun)


async def test_kill_of_the_only_worker_pauses_until_it_is_back() -> None:
    async with AsyncExitStack() as stack:
        built, workers = await started(stack, 1)
        begun = await begin(built)
        workers[0].child.kill()
        await until(lambda: built.metric("streams_waiting") == COUNT)
        await stack.enter_async_context(process("--rate", "60", "--port", str(workers[0].port)))
        back = time.monotonic()
        await until(lambda: built.metric("streams_waiting") == 0)
        assert time.monotonic() - back < 5
        await finish(built, begun)


async def test_a_stopped_worker_is_left_in_time_and_taken_back() -> None:
    async with AsyncExitStack() as stack:
        built, workers = await started(stack, 2, silence=1.0)
        begun = await begin(built)
        workers[0].child.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await until(lambda: built.metric("worker_streams", worker=workers[0].address) == 0)
        # By default it would be later.
        assert time.monotonic() - stopped < DispatcherOptions().silence_timeout
        assert built.metric("worker_up", worker=workers[0].address) == 0
        await finish(built, begun)
        workers[0].child.send_signal(signal.SIGCONT)
        await until(lambda: built.metric("worker_up", worker=workers[0].address) == 1)


async def test_poison_that_takes_whole_processes_is_given_up_in_the_end() -> None:
    """Nobody is left to say who was in the step, so it is never accused: the last limit ends it."""
    async with AsyncExitStack() as stack:
        built, workers = await started(stack, 1, "--killer", "300")
        poison = asyncio.create_task(consume(built, generation((5, 300), seconds=100)))
        worker = workers[0]
        for _ in range(7):
            await worker.child.wait()
            again = process("--rate", "60", "--killer", "300", "--port", str(worker.port))
            worker = await stack.enter_async_context(again)
        with pytest.raises(GenerationError) as failed:
            await poison
        assert failed.value.reason is Reason.ENGINE_DEAD
        assert failed.value.retryable
        assert built.metric("strikes_total") == 8
