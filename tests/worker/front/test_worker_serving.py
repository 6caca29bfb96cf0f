"""One worker, as real processes, serves well-behaved and ill-behaved gateways."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE
from tests.waiting import until
from tests.worker.front.worker_process import (
    Gateway,
    WorkerProcess,
    attached,
    end_of,
    read_log,
    submit,
    worker,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    tiny_mixtral: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[WorkerProcess]:
    log = tmp_path_factory.mktemp("serving") / "worker.log"
    # Its probation ends meanwhile, which nobody notices.
    flags = ("--metrics-listen", "127.0.0.1:0", "--probation", "0.1")
    async with worker(tiny_mixtral, log, *flags) as process:
        await process.ready()
        yield process
    errors = [line for line in read_log(log) if line["level"] == "error"]
    assert not errors, "nothing that gateways do is an error of the worker"


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(served: WorkerProcess) -> AsyncIterator[Gateway]:
    async with attached(served) as one:
        yield one


async def idle(served: WorkerProcess) -> None:
    """Soon: not once 2000 tokens have been generated, which ends a request in any case."""

    async def nothing_runs() -> pb.Status | None:
        status = await served.status()
        return status if status.running == status.waiting == status.kv_pages_used == 0 else None

    before = await served.status()
    after = await until(nothing_runs, "idle")
    assert after.step - before.step < 500


async def test_the_model_introduces_itself(served: WorkerProcess) -> None:
    model = await served.stub.GetModel(pb.GetModelRequest())
    assert (model.id, model.architecture) == ("tiny-mixtral", "MixtralForCausalLM")
    assert (model.vocab_size, list(model.eos_token_ids), model.page_size) == (VOCAB_SIZE, [EOS_TOKEN_ID], 16)
    assert (model.dtype, model.device, model.max_model_len) == ("float32", "cpu", 2048)


async def test_the_tokenizer_comes_in_chunks_by_its_hash(served: WorkerProcess, tiny_mixtral: Path) -> None:
    model = await served.stub.GetModel(pb.GetModelRequest())
    files: dict[str, bytes] = {}
    async for chunk in served.stub.GetTokenizer(pb.GetTokenizerRequest(tokenizer_hash=model.tokenizer_hash)):
        assert len(chunk.data) <= 2**20
        files[chunk.name] = files.get(chunk.name, b"") + chunk.data
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert files[name] == (tiny_mixtral / name).read_bytes()
    wrong = pb.GetTokenizerRequest(tokenizer_hash=hashlib.sha256(b"another").hexdigest())
    assert await served.stub.GetTokenizer(wrong).code() == grpc.StatusCode.NOT_FOUND


async def test_a_generation_streams_and_ends_at_its_length(gateway: Gateway) -> None:
    answer = await gateway.generate(submit(1, max_tokens=12))
    assert answer.finish_reason == pb.FINISH_REASON_LENGTH
    assert len(answer.token_ids) == answer.frames == 12
    assert answer.logprobs == []


async def test_a_stop_token_ends_it_and_is_delivered(gateway: Gateway) -> None:
    whole = (await gateway.generate(submit(1))).token_ids
    stop = whole[5]
    first = whole.index(stop)
    answer = await gateway.generate(submit(2, stop_token_ids=[stop]))
    assert (answer.token_ids, answer.finish_reason) == (whole[: first + 1], pb.FINISH_REASON_STOP)
    longer = await gateway.generate(submit(3, stop_token_ids=[stop], min_tokens=first + 4))
    assert len(longer.token_ids) >= first + 4, "no stop token before min_tokens"


async def test_logprobs_come_one_a_token(gateway: Gateway) -> None:
    sampling = pb.Sampling(top_p=1, repetition_penalty=1, logprobs=3)
    answer = await gateway.generate(submit(1, sampling=sampling))
    assert len(answer.logprobs) == len(answer.token_ids)
    for token_id, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(logprobs.top_token_ids) == len(logprobs.top_logprobs) == 3
        assert logprobs.top_token_ids[0] == token_id, "greedy takes the most likely"
        assert logprobs.logprob == pytest.approx(logprobs.top_logprobs[0])
        assert list(logprobs.top_logprobs) == sorted(logprobs.top_logprobs, reverse=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_resumed_request_goes_on_as_if_nothing_had_happened(
    gateway: Gateway, temperature: float
) -> None:
    sampling = pb.Sampling(temperature=temperature, top_p=0.9, repetition_penalty=1.1, seed=42)
    whole = (await gateway.generate(submit(1, sampling=sampling))).token_ids
    resumed = submit(2, token_ids=[5, 6, 7, *whole[:9]], resumed=9, sampling=sampling)
    assert (await gateway.generate(resumed)).token_ids == whole[9:]


async def test_two_gateways_with_equal_handles(served: WorkerProcess) -> None:
    async with attached(served) as a, attached(served) as b:
        prompts = {handle: [3 + handle, 4, 5] for handle in range(1, 5)}
        for handle, prompt in prompts.items():
            await a.submit(submit(handle, prompt, max_tokens=40))
            await b.submit(submit(handle, prompt[::-1], max_tokens=40))
        together_a = {handle: (await a.ended(handle)).token_ids for handle in prompts}
        together_b = {handle: (await b.ended(handle)).token_ids for handle in prompts}
        assert together_a != together_b
        for handle, prompt in prompts.items():
            assert (await a.generate(submit(100 + handle, prompt, max_tokens=40))).token_ids == together_a[
                handle
            ]
        assert a.frames < 4 * 40 * 2, "a frame holds the deltas of a whole step"


@pytest.mark.timed
async def test_cancel_frees_soon(served: WorkerProcess, gateway: Gateway) -> None:
    await gateway.submit(submit(1, max_tokens=2000), submit(2, max_tokens=2000))
    await gateway.streaming(2)
    assert (await served.status()).running == 2
    await gateway.cancel(1)
    await gateway.cancel(2)
    await gateway.cancel(99)
    await idle(served)
    assert not gateway.answer(1).ended


@pytest.mark.timed
async def test_a_stream_that_ends_frees_soon(served: WorkerProcess) -> None:
    async with attached(served) as gateway:
        await gateway.submit(submit(1, max_tokens=2000), submit(2, max_tokens=2000))
        await gateway.streaming(2)
    await idle(served)


@pytest.mark.timed
async def test_half_a_stream_is_none(served: WorkerProcess) -> None:
    call = served.stub.Attach()
    await call.write(pb.GatewayFrame(hello=pb.Hello(gateway_id="half")))
    await call.write(pb.GatewayFrame(submit=submit(1, max_tokens=2000)))
    await call.done_writing()
    assert await end_of(call) == grpc.StatusCode.OK
    await idle(served)


async def test_hello_comes_first(served: WorkerProcess) -> None:
    call = served.stub.Attach()
    await call.write(pb.GatewayFrame(submit=submit(1)))
    assert await end_of(call) == grpc.StatusCode.INVALID_ARGUMENT
    assert "hello" in (await call.details() or "")


async def test_a_bad_request_fails_and_its_neighbour_goes_on(gateway: Gateway) -> None:
    await gateway.submit(submit(1, max_tokens=50), submit(2, token_ids=[VOCAB_SIZE]), submit(3, max_tokens=0))
    for handle in (2, 3):
        error = (await gateway.ended(handle)).error
        assert error is not None
        assert (error.reason, error.retryable) == (pb.REASON_BAD_REQUEST, False)
    assert (await gateway.ended(1)).finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.timed
async def test_a_status_comes_at_least_once_a_second(gateway: Gateway) -> None:
    gateway.statuses.clear()
    begun = time.monotonic()
    await until(lambda: len(gateway.statuses) >= 2, "two heartbeats")
    assert time.monotonic() - begun < 2.5
    last = gateway.statuses[-1]
    assert (last.state, last.max_running) == (pb.STATE_READY, 32)
    assert last.engine_pid not in (0, last.pid)
    assert last.last_progress_ms < 2000


async def test_garbage_on_the_port_leaves_it_alive(served: WorkerProcess, gateway: Gateway) -> None:
    host, port = served.address.split(":")
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, HTTP2_PREFACE + b"\xff\xff\xff"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        # It says goodbye, hangs up, or waits for the rest.
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            await asyncio.wait_for(reader.read(), 0.2)
        writer.close()
    call = served.channel.stream_stream("/moebius.worker.v1.Worker/Attach")()
    await call.write(b"\xff\xff\xff no message")
    assert await end_of(call) == grpc.StatusCode.INVALID_ARGUMENT
    assert (await gateway.generate(submit(1))).finish_reason


async def test_a_long_prompt_fits_in_a_message(gateway: Gateway) -> None:
    """It is refused by the model's limit, not by the transport."""
    answer = await gateway.generate(submit(1, token_ids=[300] * 3_000_000))
    assert answer.error is not None
    assert "3000000 tokens" in answer.error.message


async def test_pings_do_not_end_a_quiet_connection(served: WorkerProcess) -> None:
    """By default a gRPC server ends a quiet connection after a few pings."""
    options = [
        ("grpc.keepalive_time_ms", 300),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with grpc.aio.insecure_channel(served.address, options=options) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(TimeoutError):
            # Nothing comes, and above all no end of the stream.
            await asyncio.wait_for(watch.read(), 3)


async def test_metrics_tell_what_the_status_tells(served: WorkerProcess, gateway: Gateway) -> None:
    await gateway.generate(submit(1, max_tokens=10))
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{served.metrics}/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['moebius_worker_state{state="READY"}'] == "1.0"
    assert values['moebius_worker_state{state="FAILED"}'] == "0.0"
    assert values["moebius_worker_requests_in_flight"] == "0.0"
    assert values['moebius_worker_engine_restarts_total{reason="ENGINE_DEAD"}'] == "0.0"
    assert values["moebius_worker_gateways"] == "1.0"
    model = 'model_name="tiny-mixtral"'
    assert values[f"vllm:num_requests_running{{{model}}}"] == "0.0"
    assert values[f"vllm:kv_cache_usage_perc{{{model}}}"] == "0.0"
    for name in ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count"):
        assert float(values[f"vllm:{name}{{{model}}}"]) > 0
    assert any(key.startswith("vllm:cache_config_info{") and 'block_size="16"' in key for key in values)
