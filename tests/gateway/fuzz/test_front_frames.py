"""A gateway that sends anything at all: the front ends its stream with a status, and serves the others."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.engine.pipe import FrontGoneError, Pipe
from moebius_worker.framing import FrameError, FrameReader, encode
from tests.gateway.fuzz.frames import garbage
from tests.waiting import PATIENCE, until
from tests.worker.front.worker_process import WorkerProcess, attached, submit, worker

ATTACH = "/moebius.worker.v1.Worker/Attach"
EXAMPLE = pb.GatewayFrame(submit=submit(1))
SIM = '{"ttft": 0.001, "itl": 0.001, "answer_tokens": 8}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def simulated(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerProcess]:
    log = tmp_path_factory.mktemp("front") / "log"
    async with worker("", log, "--engine", "sim", "--sim", SIM) as process:
        await process.ready()
        yield process


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seed", range(3))
async def test_a_garbling_gateway_costs_nobody_else(simulated: WorkerProcess, seed: int) -> None:
    before = await simulated.status()
    ended = []
    for data in garbage(seed, 40, EXAMPLE):
        call = simulated.channel.stream_stream(ATTACH)()
        if data and data[0] % 2:  # with and without a greeting before it
            await call.write(pb.GatewayFrame(hello=pb.Hello(gateway_id="garbler")).SerializeToString())
        try:
            await call.write(data)
            await call.done_writing()
            async with asyncio.timeout(PATIENCE):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass
        ended.append(await call.code())
    # Those of a frame that made sense end as any stream does.
    assert set(ended) <= {
        grpc.StatusCode.OK,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
    assert len(set(ended)) > 1
    async with attached(simulated) as gateway:
        answer = await gateway.generate(submit(1, max_tokens=4))
    assert answer.error is None
    after = await until(lambda: _idle(simulated), "nothing is left behind")
    assert (after.incarnation, after.pid) == (before.incarnation, before.pid), "the engine was started anew"


async def _idle(process: WorkerProcess) -> pb.Status | None:
    status = await process.status()
    return status if not status.running and not status.waiting else None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=5), st.binary(max_size=40), st.integers(1, 9))
def test_between_front_and_engine_a_frame_is_whole_or_the_connection_is_over(
    payloads: list[bytes], noise: bytes, piece: int
) -> None:
    frames = b"".join(len(payload).to_bytes(4, "little") + payload for payload in payloads) + noise
    reader, got = FrameReader(), list[bytes]()
    with contextlib.suppress(FrameError):
        for at in range(0, len(frames), piece):
            got += reader.feed(frames[at : at + piece])
    assert got[: len(payloads)] == payloads


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_the_engine_reads_frames_or_says_that_it_cannot(data: bytes, framed: bool) -> None:
    front, engine = socket.socketpair()
    with front, engine:
        pipe = Pipe(engine)
        good = engine_pb2.FrontFrame(cancel=pb.Cancel(handle=3))
        front.sendall(encode(good))
        assert pipe.receive(1.0) == [good]
        front.sendall(len(data).to_bytes(4, "little") + data if framed else data)
        front.close()
        with pytest.raises((FrameError, FrontGoneError)):
            _read_to_the_end(pipe)


def _read_to_the_end(pipe: Pipe) -> None:
    while True:
        assert all(isinstance(frame, engine_pb2.FrontFrame) for frame in pipe.receive(1.0))
