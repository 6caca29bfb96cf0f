"""moebius.worker.v1.Worker over gRPC: thin, since the exchange and the state know the answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import structlog
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1 import worker_pb2_grpc

from moebius_worker.front.exchange import Exchange
from moebius_worker.front.state import WorkerState
from moebius_worker.front.stream import GatewayStream

CHUNK_BYTES = 2**20

log = structlog.get_logger(__name__)


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """`changed` is awaited when the worker's state has changed."""

    def __init__(
        self, state: WorkerState, exchange: Exchange, changed: Callable[[], Awaitable[None]]
    ) -> None:
        self._state = state
        self._exchange = exchange
        self._changed = changed

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.GatewayFrame], context: grpc.aio.ServicerContext
    ) -> None:
        first = await anext(requests, None)
        if first is None or first.WhichOneof("frame") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first frame must be hello")
        gateway_id = first.hello.gateway_id
        log.info("gateway attached", gateway=gateway_id, peer=context.peer())
        with self._exchange.attached(gateway_id) as stream:
            stream.put(pb.WorkerFrame(status=self._state.status()))
            overrun = await self._converse(stream, requests, context)
        log.info("gateway detached", gateway=gateway_id, overrun=overrun)
        if overrun:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "the gateway does not keep up with reading"
            )

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> pb.Model:
        return await self._loaded_model(context)

    async def GetTokenizer(  # noqa: N802
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FileChunk]:
        model = await self._loaded_model(context)
        if request.tokenizer_hash != model.tokenizer_hash:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"the served tokenizer is {model.tokenizer_hash}; ask GetModel"
            )
        for name, content in self._state.tokenizer_files.items():
            for start in range(0, max(1, len(content)), CHUNK_BYTES):
                yield pb.FileChunk(name=name, data=content[start : start + CHUNK_BYTES])

    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.Status:
        return self._state.status()

    async def Drain(  # noqa: N802
        self, request: pb.DrainRequest, context: grpc.aio.ServicerContext
    ) -> pb.DrainResponse:
        return pb.DrainResponse(remaining=await self.drain(request.timeout_ms / 1000))

    async def drain(self, seconds: float) -> int:
        """Admits nothing more; returns how many requests were left after `seconds` at most."""
        self._state.draining = True
        await self._changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._exchange.idle()
        return self._exchange.in_flight

    async def _loaded_model(self, context: grpc.aio.ServicerContext) -> pb.Model:
        if self._state.model is None:
            state = pb.State.Name(self._state.state)
            fault = self._state.last_fault.message if self._state.last_fault else "the model is loading"
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"{state}: {fault}")
        return self._state.model

    async def _converse(
        self,
        stream: GatewayStream,
        requests: AsyncIterator[pb.GatewayFrame],
        context: grpc.aio.ServicerContext,
    ) -> bool:
        """Until the gateway ends the stream, or it lags too far behind; returns whether it did that."""
        receiving = asyncio.create_task(self._receive(stream, requests))
        sending = asyncio.create_task(_send(stream, context))
        overrun = asyncio.create_task(stream.overrun())
        tasks = {receiving, sending, overrun}
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in ended:
            task.result()
        return overrun in ended

    async def _receive(self, stream: GatewayStream, requests: AsyncIterator[pb.GatewayFrame]) -> None:
        async for frame in requests:
            # Frames of another kind are of a later version.
            match frame.WhichOneof("frame"):
                case "submit":
                    self._exchange.submit(stream, frame.submit)
                case "cancel":
                    self._exchange.cancel(stream, frame.cancel.handle)


async def _send(stream: GatewayStream, context: grpc.aio.ServicerContext) -> None:
    async for frame in stream.frames():
        await context.write(frame)
