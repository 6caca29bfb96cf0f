"""One gateway's Attach stream, as the rest of the front sees it: a bounded queue of frames to send."""

import asyncio
from collections.abc import AsyncIterator
from typing import Never

from moebius_proto.worker.v1 import worker_pb2 as pb

# Frames, hence engine steps, that a gateway may lag behind: some seconds of the fastest engine.
MAX_LAG_FRAMES = 1024


class LaggingGatewayError(Exception):
    """The gateway does not read, or not fast enough."""


class GatewayStream:
    """Frames are put without waiting; a gateway that lags too far behind loses its stream."""

    def __init__(self, max_lag: int = MAX_LAG_FRAMES) -> None:
        # The gateway's handles of live requests, and the engine's.
        self.handles: dict[int, int] = {}
        self._frames: asyncio.Queue[pb.WorkerFrame] = asyncio.Queue(max_lag)
        self._overrun = asyncio.Event()

    def put(self, frame: pb.WorkerFrame) -> None:
        """Queues a frame; after an overrun it is dropped, like the stream."""
        if self._overrun.is_set():
            return
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self._overrun.set()

    async def frames(self) -> AsyncIterator[pb.WorkerFrame]:
        while True:
            yield await self._frames.get()

    async def watch_lag(self) -> Never:
        """Raises LaggingGatewayError when the gateway has lagged too far behind."""
        await self._overrun.wait()
        raise LaggingGatewayError(f"the gateway is {self._frames.maxsize} frames behind with reading")
