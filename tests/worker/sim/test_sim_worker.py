"""A worker with a simulated engine, as a real process: its times, its replays, its faults."""

import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

from moebius_common.settings import read_settings
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import WorkerStub
from moebius_worker.front.server import Stop
from moebius_worker.sim.answer import word_at
from moebius_worker.sim.host import HostSettings, host
from moebius_worker.sim.vocabulary import vocabulary
from tests.ports import free_port
from tests.stack import MOEBIUS
from tests.waiting import PATIENCE, until
from tests.worker.front.worker_process import Gateway, attached, submit, worker

WORDS = vocabulary("").words
FAST = ("--sim.ttft", "0", "--sim.itl", "0.001")


def said(seed: int, count: int) -> list[int]:
    return [word_at(seed, position, WORDS) for position in range(count)]


REASONS = {
    "raise": pb.REASON_ENGINE_DEAD,
    "die": pb.REASON_ENGINE_DEAD,
    "stall": pb.REASON_ENGINE_STALLED,
    # Without a word.
    "reset": None,
}


@contextlib.asynccontextmanager
async def hosted(*flags: str, first: int = 0) -> AsyncIterator[Gateway]:
    """Workers in this process; yields a gateway's end of the first one's protocol."""
    first = first or free_port()
    listen = ("--engine", "sim", "--listen", f"127.0.0.1:{first}")
    settings = read_settings(HostSettings, [*listen, *flags])
    stop = Stop()
    hosting = asyncio.create_task(host(settings, stop))
    try:
        async with channels(first, 1) as [stub]:

            async def ready() -> bool:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    return (await stub.GetStatus(pb.GetStatusRequest())).state == pb.STATE_READY
                return False

            await until(ready, "the first is ready")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{first}") as channel:
            gateway = Gateway(channel)
            await gateway.attach()
            yield gateway
            gateway.close()
    finally:
        stop.ask()
        stop.ask()
        await hosting


@contextlib.asynccontextmanager
async def channels(first: int, count: int) -> AsyncIterator[list[WorkerStub]]:
    async with contextlib.AsyncExitStack() as stack:
        ports = range(first, first + count)
        opened = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in ports]
        yield [WorkerStub(await stack.enter_async_context(channel)) for channel in opened]


def faults(*pairs: tuple[str, int]) -> tuple[str, str]:
    listed = [{"action": action, "after_tokens": count} for action, count in pairs]
    return "--sim.faults", json.dumps(listed)


def test_it_needs_no_torch() -> None:
    code = "import sys, moebius_worker.sim.engine, moebius_worker.sim.host; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.timed
async def test_it_takes_the_time_that_it_is_told() -> None:
    flags = ("--sim.ttft", "0.3", "--sim.itl", "0.05", "--sim.prefill-rate", "1000", "--sim.jitter", "0")
    async with hosted(*flags) as gateway:
        begun = time.monotonic()
        await gateway.submit(submit(1, [5] * 200, max_tokens=8))
        await gateway.streaming(1, 1)
        first = time.monotonic() - begun
        await gateway.ended(1)
        whole = time.monotonic() - begun
    # 0.3 s, 200 tokens of prefill, and one step; then seven.
    assert 0.55 <= first < 0.9
    assert whole >= 0.9 - 0.03
    assert whole - first < 0.7


async def test_resumed_at_any_token_it_says_the_same(tmp_path: Path) -> None:
    async with hosted(*FAST) as gateway:
        sampling = pb.Sampling(temperature=1, top_p=1, repetition_penalty=1, seed=11)
        for cut in range(40):
            resumed = [5, 6, 7, *said(11, cut)]
            await gateway.submit(submit(cut + 1, resumed, resumed=cut, max_tokens=40, sampling=sampling))
        for cut in range(40):
            answer = await gateway.ended(cut + 1)
            assert answer.token_ids == said(11, 40)[cut:]
            assert answer.finish_reason == pb.FINISH_REASON_LENGTH


async def test_it_keeps_to_grammars(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "parts": {"type": "array", "items": {"type": "integer"}}},
        "required": ["name", "parts"],
        "additionalProperties": False,
    }
    tokenizer = Tokenizer.from_str(vocabulary("").files["tokenizer.json"].decode())
    grammar = pb.Grammar(text=json.dumps({"grammars": [{"json_schema": schema}]}))
    async with hosted(*FAST) as gateway:
        for seed in range(1, 6):
            sampling = pb.Sampling(top_p=1, repetition_penalty=1, seed=seed)
            await gateway.submit(
                submit(seed, max_tokens=2000, grammar=grammar, sampling=sampling, stop_token_ids=[2])
            )
        for seed in range(1, 6):
            answer = await gateway.ended(seed)
            assert answer.finish_reason == pb.FINISH_REASON_STOP
            value = json.loads(tokenizer.decode(answer.token_ids))
            assert set(value) == {"name", "parts"}


async def test_it_loads_slowly_and_says_how_far_it_is(tmp_path: Path) -> None:
    levels = [{"name": "quick", "settings": {"sim": {"start_seconds": 0.0}}}]
    slow = ("--engine", "sim", "--sim.start-seconds", "300", "--fallback-levels", json.dumps(levels))
    async with worker("", tmp_path / "log", *slow, "--level-file", str(tmp_path / "level")) as process:
        await process.in_state(pb.STATE_LOADING)

        async def pretends() -> bool:
            load = (await process.status()).load
            return load.phase == "pretending to load" and load.bytes_done < load.bytes_total == 300_000

        await until(pretends, "the phase")
        # It would not be over for minutes.
        (tmp_path / "level").write_text('moebius.dev/fallback-level="1"\n')
        status = await process.ready()
        assert status.restarts == 1


@pytest.mark.timed
@pytest.mark.parametrize("action", ["raise", "die", "stall", "reset"])
async def test_what_goes_wrong_is_over_soon(action: str) -> None:
    first = free_port()
    flags = (*FAST, *faults((action, 30)), "--stall-timeout", "2.5", "--workers", "3")
    async with hosted(*flags, first=first) as gateway, channels(first, 3) as stubs:

        async def incarnations() -> list[str] | None:
            try:
                statuses = [await stub.GetStatus(pb.GetStatusRequest()) for stub in stubs]
            except grpc.aio.AioRpcError:
                return None
            ready = all(status.state == pb.STATE_READY for status in statuses)
            return [status.incarnation for status in statuses] if ready else None

        before = await until(incarnations, "all are ready")
        await gateway.submit(submit(1, max_tokens=100))
        answer = gateway.answer(1)
        await until(lambda: answer.ended or gateway.code is not None, "an end")
        assert answer.token_ids == said(1, 30)
        reason = None if answer.error is None else answer.error.reason
        assert reason == REASONS[action]
        after = await until(incarnations, "all are ready again")
        assert (after[1:], after[0] == before[0]) == (before[1:], action == "raise")


@pytest.mark.timed
async def test_a_process_dies_for_real(tmp_path: Path) -> None:
    flags = (*FAST, *faults(("die", 5), ("reset", 5)))
    async with (
        worker("", tmp_path / "log", "--engine", "sim", *flags) as process,
        attached(process) as gateway,
    ):
        await process.ready()
        answer = await gateway.generate(submit(1, max_tokens=40))
        assert answer.error is not None
        assert (answer.error.reason, answer.error.in_step) == (pb.REASON_ENGINE_DEAD, True)
        assert (await process.ready()).restarts == 1


@pytest.mark.timed
async def test_reset_takes_the_whole_process(tmp_path: Path) -> None:
    flags = (*FAST, *faults(("reset", 5)))
    async with (
        worker("", tmp_path / "log", "--engine", "sim", *flags) as process,
        attached(process) as gateway,
    ):
        await process.ready()
        await gateway.submit(submit(1, max_tokens=40))
        await until(lambda: gateway.code is not None, "the end of the stream")
        assert await asyncio.wait_for(process.process.wait(), PATIENCE) < 0
        assert gateway.answer(1).error is None, "without a word"


async def test_jitter_spreads_the_steps() -> None:
    async with hosted("--sim.ttft", "0", "--sim.itl", "0.02", "--sim.jitter", "0.5") as gateway:
        await gateway.submit(submit(1, max_tokens=40))
        times: list[float] = []
        for count in range(1, 41):
            await gateway.streaming(1, count)
            times.append(time.monotonic())
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert statistics.pstdev(gaps) > 0.002


async def test_the_command_hosts_workers_until_it_is_told_to_stop(tmp_path: Path) -> None:
    first = free_port()
    with (tmp_path / "log").open("wb") as log:
        host = await asyncio.create_subprocess_exec(
            *(MOEBIUS, "sim", "--workers", "2", "--listen", f"127.0.0.1:{first}"), stderr=log
        )
    try:
        async with channels(first, 2) as stubs:

            async def models() -> list[str] | None:
                try:
                    return [(await stub.GetModel(pb.GetModelRequest())).id for stub in stubs]
                except grpc.aio.AioRpcError:
                    assert host.returncode is None
                    return None

            assert await until(models, "two workers") == ["sim", "sim"]
    finally:
        if host.returncode is None:
            host.terminate()
        assert await asyncio.wait_for(host.wait(), PATIENCE) == 0
