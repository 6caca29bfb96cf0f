"""A worker that sends anything at all: it costs its own stream, never the gateway or other workers."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.message import DecodeError

from moebius_gateway.types import GenerationError, Reason
from moebius_gateway.workers import wire
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.dispatching import consume, gateway, generation
from tests.gateway.fuzz.frames import filled, garbage
from tests.gateway.worker_standin import SERVER_OPTIONS, Plan, StandIn, serving, undisturbed
from tests.ports import free_port
from tests.waiting import until

SERVICE = "moebius.worker.v1.Worker"
EXAMPLE = pb.WorkerFrame(
    deltas=[pb.Delta(handle=1, token_ids=[5, 6], logprobs=[pb.TokenLogprobs(logprob=-1, top_token_ids=[3])])],
    failures=[pb.Failure(handle=2, error=pb.Error(reason=pb.REASON_ENGINE_DEAD, message="dead"))],
    status=pb.Status(incarnation="g-1", state=pb.STATE_READY, max_running=8),
)


class Garbler(StandIn):
    """Sends a frame of `garbage` every few milliseconds, on a stream of bytes, and says that it is ready."""

    def __init__(self, seed: int, count: int) -> None:
        super().__init__(Plan(), name="g")
        self.left = list(garbage(seed, count, EXAMPLE))
        self.handles: list[int] = []
        self.attaches = 0

    async def attach(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        self.attaches += 1
        listening = asyncio.create_task(self._listen(requests))
        try:
            while True:
                yield pb.WorkerFrame(status=self.status()).SerializeToString()
                await asyncio.sleep(0.01)
                if self.left:
                    yield self._addressed(self.left.pop())
        finally:
            listening.cancel()

    async def _listen(self, requests: AsyncIterator[bytes]) -> None:
        async for data in requests:
            self.handles.append(pb.GatewayFrame.FromString(data).submit.handle)

    def _addressed(self, data: bytes) -> bytes:
        """About the latest request, if it can be read, and not about one that nobody knows."""
        with contextlib.suppress(DecodeError):
            frame = pb.WorkerFrame.FromString(data)
            for part in (*frame.deltas, *frame.failures):
                part.handle = self.handles[-1] if self.handles else 1
            return frame.SerializeToString()
        return data


@asynccontextmanager
async def garbling(worker: Garbler) -> AsyncIterator[int]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {
        "Attach": grpc.stream_stream_rpc_method_handler(worker.attach),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            worker.GetModel, pb.GetModelRequest.FromString, pb.Model.SerializeToString
        ),
        "GetTokenizer": grpc.unary_stream_rpc_method_handler(
            worker.GetTokenizer, pb.GetTokenizerRequest.FromString, pb.FileChunk.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port(f"127.0.0.1:{free_port()}")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


@pytest.mark.timed
@pytest.mark.parametrize("seed", range(3))
async def test_a_garbling_worker_costs_nobody_else(seed: int) -> None:
    worker = Garbler(seed, 60)
    async with (
        garbling(worker) as bad,
        serving(StandIn(Plan(rate=500))) as good,
        gateway(bad, good, reconnect_pause=0.02, silence_timeout=2) as built,
    ):
        await until(lambda: built.ready("standin"))

        async def ask(number: int) -> bool:
            """Whether it was answered whole. Anything but a typed error goes up."""
            try:
                seen = await consume(built, generation(seed=number, max_tokens=6, seconds=10))
            except GenerationError as error:
                return not error.message
            return tuple(seen.tokens) == undisturbed((5, 6, 7), number, 6)

        answered = []
        while worker.left:
            answered.append(await ask(len(answered)))
        # A frame that can be read may end a request, or say what is not so; one that cannot be read may not.
        assert sum(answered) > len(answered) / 2
        assert worker.attaches > 10, "nearly no frame was unreadable"
        await until(built.idle)


def test_any_readable_frame_is_translated_or_refused() -> None:
    """What `wire` makes of frames with anything in their fields; uneven lists are a ValueError."""
    draw = random.Random(7)
    refused = 0
    for _ in range(2000):
        frame = filled(draw, pb.WorkerFrame())
        assert isinstance(frame, pb.WorkerFrame)
        for delta in frame.deltas:
            try:
                assert wire.tokens(delta).token_ids == tuple(delta.token_ids)
            except ValueError:
                refused += 1
        for failure in frame.failures:
            assert wire.failure(failure.error, "w", "i").reason in Reason
        wire.state(frame.status)
        wire.detail(frame.status)
    assert refused
