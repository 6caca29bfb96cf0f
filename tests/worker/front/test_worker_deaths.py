"""What a worker does about an engine that dies, hangs, raises or cannot be started. Real processes."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.engine.loop import MAX_RAISES
from tests.waiting import PATIENCE, until
from tests.worker.front.worker_process import Gateway, WorkerProcess, attached, gone, submit, worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

RAISE, KILL, HANG = 380, 381, 382
FAULTS = json.dumps(
    [
        {"token_id": RAISE, "action": "raise"},
        {"token_id": KILL, "action": "kill"},
        {"token_id": HANG, "action": "hang"},
    ]
)
# Never draws a token that is a fault.
HARMLESS = pb.Sampling(
    top_p=1, repetition_penalty=1, logit_bias=dict.fromkeys((RAISE, KILL, HANG), -1000000000.0)
)
# An engine that waits says so each second; on a machine with other work it may be late.
STALL_SECONDS = 3.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frail(tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcess]:
    log = tmp_path_factory.mktemp("deaths") / "worker.log"
    flags = ("--inject-faults", FAULTS, "--stall-timeout", str(STALL_SECONDS), "--max-restart-delay", "0.2")
    async with worker(tiny_mixtral, log, *flags) as process:
        yield process


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(frail: WorkerProcess) -> AsyncIterator[Gateway]:
    await frail.ready()
    async with attached(frail) as one:
        yield one


def long_one(handle: int) -> pb.Submit:
    return submit(handle, max_tokens=2000, sampling=HARMLESS)


async def error_of(gateway: Gateway, handle: int) -> pb.Error:
    error = (await gateway.ended(handle)).error
    assert error is not None
    return error


@pytest.mark.timed
async def test_a_killed_engine_is_told_at_once_and_replaced(frail: WorkerProcess, gateway: Gateway) -> None:
    before = await frail.status()
    undisturbed = (await gateway.generate(submit(1, sampling=HARMLESS))).token_ids
    await gateway.submit(long_one(2), long_one(3))
    await gateway.streaming(3)
    os.kill(before.engine_pid, signal.SIGKILL)
    for handle in (2, 3):
        error = await error_of(gateway, handle)
        assert (error.reason, error.retryable, error.in_step) == (pb.REASON_ENGINE_DEAD, True, True)
        assert error.tokens_sent == len(gateway.answer(handle).token_ids)
    refused = await error_of_submit(gateway, submit(4, sampling=HARMLESS))
    assert (refused.reason, refused.retryable) == (pb.REASON_NOT_READY, True)
    assert refused.retry_after_ms > 0
    after = await frail.ready()
    assert after.incarnation != before.incarnation
    assert (after.restarts, after.pid) == (before.restarts + 1, before.pid)
    assert after.last_fault.reason == pb.REASON_ENGINE_DEAD
    assert after.running == 0
    assert (await gateway.generate(submit(5, sampling=HARMLESS))).token_ids == undisturbed
    states = [status.state for status in gateway.statuses]
    assert pb.STATE_RESTARTING in states, "every change of state is pushed"
    assert pb.STATE_LOADING in states
    assert gateway.statuses[-1].incarnation == after.incarnation


async def error_of_submit(gateway: Gateway, request: pb.Submit) -> pb.Error:
    await gateway.submit(request)
    return await error_of(gateway, request.handle)


@pytest.mark.timed
async def test_a_stopped_engine_is_stalled_even_when_idle(frail: WorkerProcess, gateway: Gateway) -> None:
    before = await frail.status()
    os.kill(before.engine_pid, signal.SIGSTOP)
    await until(lambda: gone(before.engine_pid), "its end")
    after = await frail.ready()
    assert after.last_fault.reason == pb.REASON_ENGINE_STALLED
    assert after.restarts == before.restarts + 1


@pytest.mark.timed
async def test_a_step_that_hangs_is_stalled(frail: WorkerProcess, gateway: Gateway) -> None:
    await gateway.submit(long_one(1))
    await gateway.streaming(1)
    await gateway.submit(submit(2, [HANG], quarantined=True))
    suspect, neighbour = await error_of(gateway, 2), await error_of(gateway, 1)
    assert suspect.reason == neighbour.reason == pb.REASON_ENGINE_STALLED
    assert (suspect.in_step, neighbour.in_step) == (True, False)


@pytest.mark.timed
async def test_a_step_that_raises_fails_its_batch_and_nothing_else(
    frail: WorkerProcess, gateway: Gateway
) -> None:
    before = await frail.status()
    await gateway.submit(long_one(1))
    await gateway.streaming(1)
    # Quarantined: it is computed in steps of its own.
    error = await error_of_submit(gateway, submit(2, [RAISE], quarantined=True))
    assert (error.reason, error.retryable, error.in_step) == (pb.REASON_ENGINE_DEAD, True, True)
    assert "InjectedError" in error.message
    await gateway.streaming(1, len(gateway.answer(1).token_ids) + 5)
    # In company.
    error = await error_of_submit(gateway, submit(3, [RAISE]))
    assert error.in_step
    assert (await error_of(gateway, 1)).in_step
    assert (await gateway.generate(submit(4, sampling=HARMLESS))).finish_reason
    after = await frail.status()
    assert (after.engine_pid, after.incarnation) == (before.engine_pid, before.incarnation)
    assert after.kv_pages_used == 0


@pytest.mark.timed
async def test_steps_that_raise_and_raise_end_the_engine(frail: WorkerProcess, gateway: Gateway) -> None:
    before = await frail.status()
    handles = range(1, 1 + MAX_RAISES)
    errors = [await error_of_submit(gateway, submit(handle, [RAISE])) for handle in handles]
    assert all(error.reason == pb.REASON_ENGINE_DEAD and error.in_step for error in errors)
    assert f"{MAX_RAISES} steps in a row" in errors[-1].message
    assert (await frail.ready()).incarnation != before.incarnation


@pytest.mark.timed
async def test_a_death_accuses_only_what_was_in_the_step(frail: WorkerProcess, gateway: Gateway) -> None:
    await gateway.submit(long_one(1))
    await gateway.streaming(1)
    await gateway.submit(submit(2, [KILL], quarantined=True))
    suspect, neighbour = await error_of(gateway, 2), await error_of(gateway, 1)
    assert (suspect.in_step, neighbour.in_step) == (True, False)
    assert suspect.reason == neighbour.reason == pb.REASON_ENGINE_DEAD
    await frail.ready()


@pytest.mark.timed
async def test_health_pushes_every_transition(frail: WorkerProcess, gateway: Gateway) -> None:
    serving = health_pb2.HealthCheckResponse
    health = health_pb2_grpc.HealthStub(frail.channel)
    names = ("", "moebius.worker.v1.Worker")
    watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in names]
    seen = [[(await watch.read()).status] for watch in watches]
    os.kill((await frail.ready()).engine_pid, signal.SIGKILL)
    for watch, statuses in zip(watches, seen, strict=True):
        statuses += [(await asyncio.wait_for(watch.read(), PATIENCE)).status for _ in range(2)]
        watch.cancel()
    assert seen == [[serving.SERVING, serving.NOT_SERVING, serving.SERVING]] * 2
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health.Check(health_pb2.HealthCheckRequest(service="unknown"))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.timed
async def test_a_stopped_front_does_not_blame_its_engine(frail: WorkerProcess, gateway: Gateway) -> None:
    before = await frail.ready()
    frail.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(STALL_SECONDS + 0.5)
    frail.process.send_signal(signal.SIGCONT)
    await asyncio.sleep(1)
    assert (await frail.status()).incarnation == before.incarnation


# The last one of those that share a worker.
async def test_the_engine_dies_with_its_front(frail: WorkerProcess, gateway: Gateway) -> None:
    engine_pid = (await frail.ready()).engine_pid
    frail.process.kill()
    await until(lambda: gone(engine_pid), "the engine's end")
    await until(lambda: gateway.code is not None, "the stream's end")
    assert gateway.code != grpc.StatusCode.OK


async def test_a_bad_checkpoint_is_permanent_and_said(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    async with worker(tmp_path / "model", tmp_path / "log") as process:
        status = await process.in_state(pb.STATE_FAILED)
        assert "config.json" in status.last_fault.message
        assert status.engine_pid == 0
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await process.stub.GetModel(pb.GetModelRequest())
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "config.json" in (error.value.details() or "")
        async with attached(process) as gateway:
            assert (await error_of_submit(gateway, submit(1))).reason == pb.REASON_NOT_READY
        assert len(process.logged("engine started")) == 1, "no hot loop"


@pytest.mark.timed
async def test_engines_that_die_at_the_start_are_started_ever_more_slowly(
    tiny_mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A broken installation: the engine cannot get past `import torch`. The front never gets there.
    (tmp_path / "torch.py").write_text("import os\nos._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with worker(tiny_mixtral, tmp_path / "log", "--restart-delay", "0.3") as process:
        await until(lambda: len(process.logged("engine ended")) >= 4, "four deaths")
        delays = [line["restart_in_seconds"] for line in process.logged("engine ended")]
        assert all(later > 1.1 * earlier for earlier, later in pairwise(delays[:4])), delays
        ends = [datetime.fromisoformat(line["timestamp"]) for line in process.logged("engine ended")]
        starts = [datetime.fromisoformat(line["timestamp"]) for line in process.logged("engine started")]
        waits = [(start - end).total_seconds() for end, start in zip(ends, starts[1:], strict=False)]
        assert all(wait >= delay - 0.05 for wait, delay in zip(waits, delays, strict=False)), (waits, delays)
        status = await process.status()
        assert "status 3 while loading" in status.last_fault.message
        assert status.restarts >= 3
