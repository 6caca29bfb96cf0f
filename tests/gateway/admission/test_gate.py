"""The gate as requests meet it, over workers that are plain data."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import CollectorRegistry

from moebius_gateway.admission.gate import RATE_LIMITED, Gate
from moebius_gateway.admission.limits import Client, ClientLimits, GateOptions, Priority
from moebius_gateway.admission.metrics import AdmissionMetrics
from moebius_gateway.types import Generation, GenerationError, Reason
from moebius_gateway.workers.view import WorkerState, WorkerView
from tests.gateway.dispatching import generation
from tests.waiting import until


def worker(max_running: int = 4, **more: int) -> WorkerView:
    """With room for one sequence more than that."""
    return WorkerView("a", WorkerState.READY, max_running=max_running, **more)  # type: ignore[arg-type]


@dataclass
class Door:
    """A gate, and sequences that stay inside until they are told to leave."""

    options: GateOptions = field(default_factory=GateOptions)
    workers: Sequence[WorkerView] = (worker(),)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    inside: list[str] = field(default_factory=list)
    leave: dict[str, asyncio.Event] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate = Gate(self.options, lambda _: self.workers, AdmissionMetrics(self.registry))

    def send(self, name: str, client: str = "", priority: int = 0, **more: object) -> asyncio.Task[None]:
        """A sequence that is called `name`."""
        wanted = generation(**more)  # type: ignore[arg-type]
        wanted = replace(wanted, request_id=name, client=client, priority=priority)
        self.leave[name] = asyncio.Event()
        self.tasks.append(asyncio.create_task(self._stay(wanted)))
        return self.tasks[-1]

    async def _stay(self, wanted: Generation) -> None:
        async with self.gate.place(wanted) as place:
            self.inside.append(wanted.request_id)
            await self.leave[wanted.request_id].wait()
            self.gate.ended(wanted, place, 10)

    def waiting(self) -> int:
        """There are no series before the first sequence."""
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return int(sum(one.value for one in samples if one.name == "moebius_gateway_admission_waiting"))

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"moebius_gateway_admission_{name}", labels)
        assert value is not None, name
        return value


@asynccontextmanager
async def door(*, max_waiting: int = 100, max_wait: float = 60.0, **more: object) -> AsyncIterator[Door]:
    made = Door(GateOptions(max_waiting, max_wait), **more)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        # Nothing is left behind, however each one went.
        assert made.waiting() == 0
        for line in made.gate._lines.values():
            assert (line.running, line.tokens, len(line.queue)) == (0, 0, 0)
        assert all(account.running == 0 for account in made.gate._accounts._accounts.values())


async def refused(task: asyncio.Task[None]) -> GenerationError:
    with pytest.raises(GenerationError) as error:
        await task
    return error.value


async def test_as_many_as_there_are_places_then_one_for_one() -> None:
    async with door() as it:
        for number in range(8):
            it.send(f"r{number}")
        await until(lambda: it.waiting() == 3)
        assert it.inside == [f"r{number}" for number in range(5)]
        it.leave["r2"].set()
        await until(lambda: it.waiting() == 2)
        assert it.inside[5:] == ["r5"]


async def test_as_many_as_the_cache_holds() -> None:
    async with door(workers=[worker(64, kv_tokens=2000)]) as it:
        for number in range(6):
            it.send(f"r{number}", prompt=range(3, 503), max_tokens=100)
        await until(lambda: it.waiting() == 3)
        assert it.metric("reserved_tokens", model="standin") == 1800
        assert it.metric("room_tokens", model="standin") == 2000


async def test_a_prompt_that_is_in_the_cache_takes_no_room_again() -> None:
    async with door(workers=[worker(64, kv_tokens=2000)]) as it:
        wanted = generation(prompt=range(3, 1503), max_tokens=10)
        async with it.gate.place(wanted) as place:
            it.send("second", prompt=range(3, 1503), max_tokens=10)
            await until(lambda: it.waiting() == 1)
            it.gate.shared(wanted, place, 1488)
            await until(lambda: it.inside == ["second"])


async def test_one_that_is_too_large_for_the_cache_is_let_through_alone() -> None:
    """The worker says best what is wrong with it."""
    async with door(workers=[worker(kv_tokens=100)]) as it:
        it.send("large", prompt=range(3, 1003))
        await until(lambda: it.inside == ["large"])


async def test_waiting_ones_of_one_client_do_not_starve_another() -> None:
    async with door() as it:
        for number in range(50):
            it.send(f"flood{number}", "flood")
        await until(lambda: it.waiting() == 45)
        it.send("other", "other")
        await until(lambda: it.waiting() == 46)
        for number in range(3):
            it.leave[f"flood{number}"].set()
        await until(lambda: "other" in it.inside)


async def test_the_urgent_go_first() -> None:
    async with door() as it:
        for number in range(5):
            it.send(f"r{number}")
        it.send("low", priority=Priority.LOW)
        it.send("normal")
        it.send("high", priority=Priority.HIGH)
        await until(lambda: it.waiting() == 3)
        for number in range(3):
            it.leave[f"r{number}"].set()
        await until(lambda: it.waiting() == 0)
        assert it.inside[5:] == ["high", "normal", "low"]


async def test_a_client_s_own_limit_makes_it_wait_and_nobody_else() -> None:
    async with door() as it:
        it.gate.charge_request(Client("a", ClientLimits(max_concurrent=2)))
        for number in range(4):
            it.send(f"a{number}", "a")
        it.send("b", "b")
        await until(lambda: it.inside == ["a0", "a1", "b"])
        it.leave["a0"].set()
        await until(lambda: it.inside == ["a0", "a1", "b", "a2"])


async def test_a_full_queue_refuses_and_says_when() -> None:
    async with door(max_waiting=3) as it:
        for number in range(8):
            it.send(f"r{number}")
        await until(lambda: it.waiting() == 3)
        error = await refused(it.send("late"))
        assert (error.reason, error.retryable) == (Reason.OVERLOADED, True)
        assert error.retry_after > 0
        assert it.metric("refusals_total", reason="full") == 1


async def test_a_flood_makes_room_for_others_in_a_full_queue() -> None:
    async with door(max_waiting=6) as it:
        for number in range(11):
            it.send(f"flood{number}", "flood")
        await until(lambda: it.waiting() == 6)
        it.send("other", "other")
        error = await refused(it.tasks[10])
        assert error.reason is Reason.OVERLOADED
        assert it.waiting() == 6
        assert (await refused(it.send("more", "flood"))).reason is Reason.OVERLOADED
        assert it.metric("refusals_total", reason="displaced") == 1
        assert it.metric("refusals_total", reason="full") == 1


@pytest.mark.timed
async def test_who_would_wait_too_long_is_told_at_once_and_how_long() -> None:
    async with door(max_wait=0.5) as it:
        begun = time.monotonic()
        for number in range(5):
            it.send(f"first{number}")
        await until(lambda: len(it.inside) == 5)
        await asyncio.sleep(0.1)
        for number in range(5):
            it.leave[f"first{number}"].set()
        await asyncio.gather(*it.tasks)
        [line] = it.gate._lines.values()
        assert line.experience.seconds is not None
        assert 0.1 <= line.experience.seconds <= time.monotonic() - begun
        # However long these took: a sequence takes half a second and a little, five at a time.
        line.experience = replace(line.experience, seconds=0.55)
        for number in range(9):
            it.send(f"r{number}")
        await until(lambda: it.waiting() == 4)
        error = await refused(it.send("late", seconds=20))
        assert error.retry_after == pytest.approx(0.55)
        assert it.metric("refusals_total", reason="forecast") == 1, "and not at its deadline"


@pytest.mark.timed
async def test_who_would_wait_beyond_its_deadline_is_told_at_once() -> None:
    async with door() as it:
        it.send("first")
        await until(lambda: it.inside)
        await asyncio.sleep(0.3)
        it.leave["first"].set()
        await asyncio.gather(*it.tasks)
        for number in range(7):
            it.send(f"r{number}")
        await until(lambda: it.waiting() == 2)
        error = await refused(it.send("hasty", seconds=0.1))
        assert error.reason is Reason.OVERLOADED
        assert it.metric("refusals_total", reason="forecast") == 1, "and not at its deadline"


async def test_with_no_worker_all_wait_for_one() -> None:
    async with door(workers=[]) as it:
        it.send("r")
        error = await refused(it.send("hasty", seconds=0.1))
        assert (error.reason, error.retry_after > 0) == (Reason.NOT_READY, True)
        assert it.waiting() == 1
        it.workers = [worker()]
        await until(lambda: it.inside == ["r"])
        assert it.metric("refusals_total", reason="deadline") == 1


async def test_a_client_that_leaves_while_it_waits_takes_no_place() -> None:
    async with door() as it:
        for number in range(7):
            it.send(f"r{number}")
        await until(lambda: it.waiting() == 2)
        it.tasks[5].cancel()
        # In the same moment: its turn comes when it is on its way out.
        it.leave["r0"].set()
        await until(lambda: it.waiting() == 0)
        assert it.inside[5:] == ["r6"]


@pytest.mark.timed
async def test_rates_are_said_with_the_time_to_come_back() -> None:
    async with door() as it:
        client = Client("a", ClientLimits(requests_per_minute=2, tokens_per_minute=600))
        it.gate.charge_request(client)
        it.gate.charge_request(client)
        with pytest.raises(GenerationError, match="requests a minute") as error:
            it.gate.charge_request(client)
        assert (error.value.reason, error.value.code) == (Reason.OVERLOADED, RATE_LIMITED)
        assert error.value.retry_after == pytest.approx(30, abs=0.1)
        it.gate.charge_prompt(client, 400)
        it.gate.charge_output(replace(generation(), client="a"), 300)
        with pytest.raises(GenerationError, match="tokens a minute") as error:
            it.gate.charge_prompt(client, 100)
        assert error.value.retry_after == pytest.approx(20, abs=0.1)
        # Others are not affected, nor is it once it has more.
        it.gate.charge_request(Client("b", ClientLimits(requests_per_minute=2)))
        it.gate.charge_request(Client("a", ClientLimits()))


async def test_a_storm_of_comings_and_goings_leaves_nothing_behind() -> None:
    async with door(max_waiting=20) as it:
        for number in range(300):
            it.send(f"r{number}", f"c{number % 7}", (number % 3) - 1, seconds=0.01 + number % 5)
            if number % 3 == 0:
                it.leave[f"r{number}"].set()
            if number % 5 == 0:
                it.tasks[number // 2].cancel()
            if number % 10 == 0:
                await asyncio.sleep(0.002)
        for event in it.leave.values():
            event.set()
        await asyncio.gather(*it.tasks, return_exceptions=True)
