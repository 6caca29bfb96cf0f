"""The exchange alone: frames in, frames out."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.front import exchange as exchange_module
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.state import WorkerState
from moebius_worker.front.stream import GatewayStream, LaggingGatewayError
from moebius_worker.front.supervise import End
from moebius_worker.metrics import RequestMetrics
from tests.waiting import PATIENCE
from tests.worker.front.worker_process import submit

MODEL = pb.Model(id="m", vocab_size=384, max_model_len=100)


class Bench:
    """An exchange with a link that records what the engine would get."""

    def __init__(self, stack: ExitStack, capacity: int = 4) -> None:
        self.stack = stack
        self.state = WorkerState(pid=1)
        self.registry = CollectorRegistry()
        self.exchange = Exchange(self.state, RequestMetrics(self.registry))
        self.sent: list[engine_pb2.FrontFrame] = []
        self.connect(capacity)

    def connect(self, capacity: int = 4) -> None:
        self.exchange.connect(self.sent.append, MODEL, capacity)

    def stream(self) -> GatewayStream:
        return self.stack.enter_context(self.exchange.attached())

    def step(self, *deltas: pb.Delta, failures: tuple[pb.Failure, ...] = ()) -> None:
        self.exchange.step_ended(engine_pb2.StepEnd(deltas=deltas, failures=failures))

    @property
    def submitted(self) -> list[int]:
        return [frame.submit.handle for frame in self.sent if frame.HasField("submit")]

    @property
    def cancelled(self) -> list[int]:
        return [frame.cancel.handle for frame in self.sent if frame.HasField("cancel")]


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


async def received(stream: GatewayStream) -> pb.WorkerFrame:
    async with asyncio.timeout(PATIENCE):
        async for frame in stream.frames():
            return frame
    raise AssertionError


async def test_equal_handles_of_two_gateways_are_kept_apart(bench: Bench) -> None:
    a, b = bench.stream(), bench.stream()
    bench.exchange.submit(a, submit(7))
    bench.exchange.submit(b, submit(7))
    first, second = bench.submitted
    assert first != second
    bench.step(pb.Delta(handle=second, token_ids=[2]), pb.Delta(handle=first, token_ids=[1]))
    assert [(d.handle, d.token_ids) for d in (await received(a)).deltas] == [(7, [1])]
    assert [(d.handle, d.token_ids) for d in (await received(b)).deltas] == [(7, [2])]


async def test_one_frame_a_step_and_gateway(bench: Bench) -> None:
    a, b = bench.stream(), bench.stream()
    for handle in (1, 2, 3):
        bench.exchange.submit(a, submit(handle))
    bench.step(*(pb.Delta(handle=handle, token_ids=[9]) for handle in bench.submitted))
    assert [delta.handle for delta in (await received(a)).deltas] == [1, 2, 3]
    bench.exchange.broadcast(pb.Status(step=1))
    assert (await received(b)).status.step == 1, "the idle gateway got nothing before the heartbeat"


async def test_a_finished_handle_is_free_and_the_exchange_idle(bench: Bench) -> None:
    stream = bench.stream()
    bench.exchange.submit(stream, submit(1))
    assert bench.exchange.in_flight == 1
    bench.step(pb.Delta(handle=bench.submitted[0], token_ids=[1], finish_reason=pb.FINISH_REASON_STOP))
    await asyncio.wait_for(bench.exchange.idle(), PATIENCE)
    assert (bench.exchange.in_flight, stream.handles) == (0, {})
    assert bench.registry.get_sample_value(
        "vllm:request_success_total", {"model_name": "m", "finished_reason": "stop"}
    )


async def test_a_stream_that_ends_cancels_its_requests_alone(bench: Bench) -> None:
    other = bench.stream()
    bench.exchange.submit(other, submit(1))
    with bench.exchange.attached() as stream:
        bench.exchange.submit(stream, submit(1))
        bench.exchange.submit(stream, submit(2))
    assert bench.cancelled == bench.submitted[1:]
    assert bench.exchange.in_flight == 1
    # What was under way for the cancelled ones goes nowhere.
    bench.step(pb.Delta(handle=bench.submitted[1], token_ids=[1]), pb.Delta(handle=bench.submitted[0]))
    assert len((await received(other)).deltas) == 1


async def test_a_handle_in_use_ends_both_requests(bench: Bench) -> None:
    stream = bench.stream()
    bench.exchange.submit(stream, submit(1))
    bench.exchange.submit(stream, submit(1))
    (failure,) = (await received(stream)).failures
    assert (failure.handle, failure.error.reason) == (1, pb.REASON_BAD_REQUEST)
    assert bench.cancelled == bench.submitted
    assert bench.exchange.in_flight == 0


async def test_an_unknown_cancel_is_nothing(bench: Bench) -> None:
    bench.exchange.cancel(bench.stream(), 99)
    assert bench.sent == []


async def test_a_bad_request_fails_alone(bench: Bench) -> None:
    stream = bench.stream()
    bench.exchange.submit(stream, submit(1))
    bench.exchange.submit(stream, submit(2, token_ids=[]))
    (failure,) = (await received(stream)).failures
    assert (failure.handle, failure.error.reason, failure.error.retryable) == (
        2,
        pb.REASON_BAD_REQUEST,
        False,
    )
    assert len(bench.submitted) == 1


async def test_death_fails_all_and_accuses_those_in_the_step(bench: Bench) -> None:
    stream = bench.stream()
    bench.exchange.submit(stream, submit(1, token_ids=[5, 6, 7], resumed=2))
    bench.exchange.submit(stream, submit(2))
    first, second = bench.submitted
    bench.exchange.step_begins(engine_pb2.StepBegin(handles=[first]))
    bench.step(pb.Delta(handle=first, token_ids=[8]))
    await received(stream)
    bench.state.engine_ended(pb.REASON_ENGINE_STALLED, "silent", permanent=False)
    bench.exchange.disconnect(End(pb.REASON_ENGINE_STALLED, "silent"))
    frame = await received(stream)
    assert frame.status.state == pb.STATE_RESTARTING, "no gateway tries again before it knows"
    failures = {failure.handle: failure.error for failure in frame.failures}
    assert {handle: error.in_step for handle, error in failures.items()} == {1: True, 2: False}
    assert [failures[1].tokens_sent, failures[2].tokens_sent] == [3, 0]
    assert all(error.retryable and error.reason == pb.REASON_ENGINE_STALLED for error in failures.values())
    # Between engines: not now. With the next one: handles go on, and nobody is accused of old steps.
    bench.exchange.submit(stream, submit(3))
    (refusal,) = (await received(stream)).failures
    assert (refusal.error.reason, refusal.error.retryable) == (pb.REASON_NOT_READY, True)
    assert refusal.error.retry_after_ms > 0
    bench.connect()
    bench.exchange.submit(stream, submit(4))
    assert bench.submitted[-1] > second


async def test_a_failure_of_the_engine_reaches_its_gateway(bench: Bench) -> None:
    stream = bench.stream()
    bench.exchange.submit(stream, submit(5))
    error = pb.Error(reason=pb.REASON_KV_EXHAUSTED, message="too long")
    bench.step(failures=(pb.Failure(handle=bench.submitted[0], error=error),))
    (failure,) = (await received(stream)).failures
    assert (failure.handle, failure.error.reason) == (5, pb.REASON_KV_EXHAUSTED)
    assert bench.exchange.in_flight == 0


async def test_more_than_fits_is_refused_at_the_door(bench: Bench) -> None:
    stream = bench.stream()
    for handle in range(5):
        bench.exchange.submit(stream, submit(handle))
    (failure,) = (await received(stream)).failures
    assert (failure.handle, failure.error.reason) == (4, pb.REASON_OVERLOADED)
    assert failure.error.retryable


async def test_a_gateway_that_lags_loses_its_stream_and_no_other() -> None:
    stream = GatewayStream(max_lag=3)
    for step in range(5):
        stream.put(pb.WorkerFrame(status=pb.Status(step=step)))
    with pytest.raises(LaggingGatewayError):
        await asyncio.wait_for(stream.watch_lag(), PATIENCE)


def value(bench: Bench, name: str, **labels: str) -> float:
    found = bench.registry.get_sample_value(name, labels)
    assert found is not None, f"{name} {labels} is not exported"
    return found


async def test_the_phases_of_a_request_are_timed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(exchange_module, "time", SimpleNamespace(monotonic=lambda: now))
    stream = bench.stream()
    bench.exchange.submit(stream, submit(1, token_ids=[5, 6, 7], resumed=2))
    [handle] = bench.submitted
    for wait, word in ((0.25, "begin"), (0.5, "first"), (1, "last")):
        now += wait
        if word == "begin":
            bench.exchange.step_begins(engine_pb2.StepBegin(handles=[handle]))
        else:
            # Another step, with another set of requests: it began long ago.
            bench.exchange.step_begins(engine_pb2.StepBegin(handles=[handle, 99]))
            reason = pb.FINISH_REASON_LENGTH if word == "last" else 0
            bench.step(pb.Delta(handle=handle, token_ids=[8], finish_reason=reason))
    times = [
        value(bench, f"vllm:{name}_sum", model_name="m")
        for name in (
            *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
            "e2e_request_latency_seconds",
        )
    ]
    assert times == [0.25, 0.5, 1, 1.75]
    # What was resumed is neither prompt nor generated here.
    assert value(bench, "vllm:request_prompt_tokens_sum", model_name="m") == 1
    assert value(bench, "vllm:request_generation_tokens_sum", model_name="m") == 2


async def test_steps_are_counted_when_they_end_and_heartbeats_are_not(bench: Bench) -> None:
    step = engine_pb2.ComputedStep(requests=3, tokens=130, seconds=0.25)
    bench.exchange.step_ended(engine_pb2.StepEnd())
    bench.exchange.step_ended(engine_pb2.StepEnd(step=step))
    for name, expected in (("seconds", 0.25), ("requests", 3), ("tokens", 130)):
        assert value(bench, f"moebius_worker_step_{name}_count") == 1
        assert value(bench, f"moebius_worker_step_{name}_sum") == expected


async def test_what_only_moves_on_faults_is_there_from_the_start(bench: Bench) -> None:
    for reason in ("OVERLOADED", "ENGINE_DEAD", "ENGINE_STALLED", "GPU_FAULT", "NOT_READY"):
        assert value(bench, "moebius_worker_request_failures_total", reason=reason) == 0
    for name in ("time_to_first_token_seconds_count", "request_queue_time_seconds_count"):
        assert value(bench, f"vllm:{name}", model_name="m") == 0
    bench.exchange.submit(bench.stream(), submit(1, token_ids=[]))
    assert value(bench, "moebius_worker_request_failures_total", reason="BAD_REQUEST") == 1
