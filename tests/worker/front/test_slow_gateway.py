"""A gateway that does not read, over real gRPC; the engine's part is played by the test."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
from prometheus_client import CollectorRegistry

from moebius_proto.worker.v1 import engine_pb2, worker_pb2_grpc
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.service import WorkerService
from moebius_worker.front.state import WorkerState
from moebius_worker.front.stream import MAX_LAG_FRAMES
from moebius_worker.metrics import RequestMetrics
from tests.waiting import until
from tests.worker.front.worker_process import Gateway, end_of, submit


@dataclass
class Front:
    exchange: Exchange
    address: str
    sent: list[engine_pb2.FrontFrame] = field(default_factory=list)


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    async def changed() -> None: ...

    state = WorkerState(pid=1)
    exchange = Exchange(state, RequestMetrics(CollectorRegistry()))
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerService(state, exchange, changed), server)
    front = Front(exchange, f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    model = pb.Model(id="m", vocab_size=384, max_model_len=10_000)
    exchange.connect(front.sent.append, model, capacity=8)
    await server.start()
    yield front
    await server.stop(None)


async def test_it_is_cut_off_and_blocks_nobody(front: Front) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(front.address, options) as slow_channel,
        grpc.aio.insecure_channel(front.address, options) as quick_channel,
    ):
        deaf = worker_pb2_grpc.WorkerStub(slow_channel).Attach()
        await deaf.write(pb.GatewayFrame(hello=pb.Hello(gateway_id="deaf")))
        await deaf.write(pb.GatewayFrame(submit=submit(1)))
        await until(lambda: front.exchange.in_flight == 1, "its request")
        quick = Gateway(quick_channel)
        await quick.attach("quick")
        await quick.submit(submit(1))
        await until(lambda: front.exchange.in_flight == 2, "the other request")
        deaf_handle, quick_handle = (frame.submit.handle for frame in front.sent)

        # Large, so that it is the gateway that has to take them and not the buffers on the way.
        large = pb.Delta(handle=deaf_handle, token_ids=[1] * 40_000)
        for step in range(2 * MAX_LAG_FRAMES):
            small = pb.Delta(handle=quick_handle, token_ids=[step])
            front.exchange.step_ended(engine_pb2.StepEnd(deltas=[large, small]))
            await quick.streaming(1, step + 1)
            if front.exchange.gateways == 1:
                break
        assert front.exchange.gateways == 1, "the deaf one is still attached"
        assert [frame.cancel.handle for frame in front.sent[2:]] == [deaf_handle]
        assert front.exchange.in_flight == 1

        assert await end_of(deaf) == grpc.StatusCode.RESOURCE_EXHAUSTED
        quick.close()
