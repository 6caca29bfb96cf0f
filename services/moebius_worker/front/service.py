"""moebius.worker.v1.Worker over gRPC: thin, since the exchange and the state know the answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1 import worker_pb2_grpc
from moebius_worker.front.exchange import Exchange
from moebius_worker.front.state import WorkerState
from moebius_worker.front.stream import GatewayStream, LaggingGatewayError

CHUNK_BYTES = 2**20
# A gateway that reads has a frame sooner.
LAST_WRITE_SECONDS = 1.0

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
        try:
            await self._serve(requests, context)
        except (_ProtocolError, DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except LaggingGatewayError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))

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

    async def _serve(
        self, requests: AsyncIterator[pb.GatewayFrame], context: grpc.aio.ServicerContext
    ) -> None:
        """Until the gateway ends the stream. Raises LaggingGatewayError, _ProtocolError, DecodeError."""
        first = await anext(requests, None)
        if first is None or first.WhichOneof("frame") != "hello":
            raise _ProtocolError("the first frame must be hello")
        with (
            self._exchange.attached() as stream,
            structlog.contextvars.bound_contextvars(gateway=first.hello.gateway_id),
        ):
            log.info("gateway attached", peer=context.peer())
            stream.put(pb.WorkerFrame(status=self._state.status()))
            try:
                await _first_to_end(
                    self._receive(stream, requests), _send(stream, context), stream.watch_lag()
                )
            finally:
                log.info("gateway detached", requests=len(stream.handles))

    async def _receive(self, stream: GatewayStream, requests: AsyncIterator[pb.GatewayFrame]) -> None:
        async for frame in requests:
            # Frames of another kind are of a later version.
            match frame.WhichOneof("frame"):
                case "submit":
                    self._exchange.submit(stream, frame.submit)
                case "cancel":
                    self._exchange.cancel(stream, frame.cancel.handle)


class _ProtocolError(Exception):
    """The gateway does not speak the protocol."""


async def _send(stream: GatewayStream, context: grpc.aio.ServicerContext) -> None:
    async for frame in stream.frames():
        writing = asyncio.ensure_future(context.write(frame))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            # That it fails when the gateway is gone is asked of nobody, which asyncio would log as an error.
            writing.add_done_callback(lambda done: done.cancelled() or done.exception())
            # While it is under way gRPC cannot say how the stream ends, and the gateway would wait for that.
            await asyncio.wait([writing], timeout=LAST_WRITE_SECONDS)
            raise


async def _first_to_end(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all until one returns or raises, and cancels the others; raises what it raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in ended:
        task.result()
