"""How a worker ends: Drain, SIGTERM, SIGINT, a second signal. Real processes, with the simulated engine."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.waiting import PATIENCE, until
from tests.worker.front.worker_process import attached, gone, submit, worker

# 100 tokens a second: what is to run on when the worker is told to end does so still, however late that is.
SLOW = ("--engine", "sim", "--sim.ttft", "0", "--sim.itl", "0.01")


@pytest.mark.timed
async def test_drain_admits_nothing_and_finishes_what_runs(tmp_path: Path) -> None:
    async with worker("", tmp_path / "log", *SLOW) as process:
        await process.ready()
        async with attached(process) as gateway:
            await gateway.submit(submit(1, max_tokens=400))
            await gateway.streaming(1)
            at_once = await process.stub.Drain(pb.DrainRequest())
            assert at_once.remaining == 1
            await gateway.submit(submit(2))
            error = (await gateway.ended(2)).error
            assert error is not None
            assert (error.reason, error.retryable) == (pb.REASON_DRAINING, True)
            assert (await process.status()).state == pb.STATE_DRAINING
            drained = await process.stub.Drain(pb.DrainRequest(timeout_ms=60_000))
            assert drained.remaining == 0
            assert (await gateway.ended(1)).finish_reason == pb.FINISH_REASON_LENGTH
            assert process.process.returncode is None, "its end is the caller's decision"
            process.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.process.wait(), PATIENCE) == 0


@pytest.mark.timed
async def test_a_signal_lets_requests_finish_and_hands_back_what_does_not(tmp_path: Path) -> None:
    async with worker("", tmp_path / "log", *SLOW, "--drain-timeout", "2.5") as process:
        engine_pid = (await process.ready()).engine_pid
        async with attached(process) as gateway:
            await gateway.submit(submit(1, max_tokens=50), submit(2, max_tokens=2000))
            await gateway.streaming(1, 40)
            process.process.terminate()
            await until(lambda: gateway.statuses[-1].state == pb.STATE_DRAINING, "the push")
            assert (await gateway.ended(1)).finish_reason == pb.FINISH_REASON_LENGTH
            error = (await gateway.ended(2)).error
            assert error is not None
            assert (error.reason, error.retryable, error.in_step) == (pb.REASON_DRAINING, True, False)
            assert error.tokens_sent == len(gateway.answer(2).token_ids)
            assert await asyncio.wait_for(process.process.wait(), PATIENCE) == 0
            assert gone(engine_pid)


@pytest.mark.timed
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with worker("", tmp_path / "log", *SLOW) as process:
        engine_pid = (await process.ready()).engine_pid
        async with attached(process) as gateway:
            await gateway.submit(submit(1, max_tokens=2000))
            await gateway.streaming(1)
            process.process.terminate()
            await until(lambda: gateway.statuses[-1].state == pb.STATE_DRAINING, "the push")
            process.process.terminate()
            assert await asyncio.wait_for(process.process.wait(), PATIENCE) == 0
            assert gone(engine_pid)
            assert len(gateway.answer(1).token_ids) < 2000


async def test_a_signal_while_loading_ends_it_at_once(tmp_path: Path) -> None:
    async with worker("", tmp_path / "log", *SLOW, "--sim.start-seconds", "300") as process:
        engine_pid = (await process.in_state(pb.STATE_LOADING)).engine_pid
        process.process.terminate()
        assert await asyncio.wait_for(process.process.wait(), PATIENCE) == 0
        assert gone(engine_pid)


async def test_a_taken_port_is_one_clear_line(tiny_mixtral: Path, tmp_path: Path) -> None:
    async with worker(tiny_mixtral, tmp_path / "log") as process:
        arguments = ("--model", str(tiny_mixtral), "--listen", process.address)
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "moebius_worker", *arguments, stderr=asyncio.subprocess.PIPE
        )
        try:
            _, stderr = await asyncio.wait_for(second.communicate(), PATIENCE)
        finally:
            if second.returncode is None:
                second.kill()
    assert second.returncode == 1
    assert f"cannot listen on {process.address}" in stderr.decode()
    assert "Traceback" not in stderr.decode()
