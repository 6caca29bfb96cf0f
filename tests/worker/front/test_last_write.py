"""A gateway that goes while a frame is written to it."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import cast

import grpc
from prometheus_client import CollectorRegistry

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.service import WorkerService
from moebius_worker.front.state import WorkerState
from moebius_worker.metrics import RequestMetrics


class Going:
    """What gRPC's context does for such a gateway."""

    def __init__(self) -> None:
        self.writes = asyncio.Event()
        self.went = asyncio.Event()

    def peer(self) -> str:
        return "a gateway"

    async def write(self, frame: pb.WorkerFrame) -> None:
        self.writes.set()
        await self.went.wait()
        # A moment later than the end of its requests is noticed.
        await asyncio.sleep(0.01)
        raise ConnectionError("it is gone")


async def test_that_the_write_fails_is_no_error() -> None:
    async def changed() -> None: ...

    async def requests() -> AsyncIterator[pb.GatewayFrame]:
        yield pb.GatewayFrame(hello=pb.Hello(gateway_id="going"))
        await context.writes.wait()
        context.went.set()

    logged: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, said: logged.append(said["message"]))
    state, context = WorkerState(pid=1), Going()
    service = WorkerService(state, Exchange(state, RequestMetrics(CollectorRegistry())), changed)
    await service.Attach(requests(), cast(grpc.aio.ServicerContext, context))
    gc.collect()
    assert not logged
