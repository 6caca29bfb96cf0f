"""An engine process as the front holds it: started over a socket pair, read without blocking, killed."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

from google.protobuf.message import DecodeError

from moebius_common.child import dies_with_us
from moebius_proto.worker.v1 import engine_pb2 as pb
from moebius_worker.framing import FrameError, FrameReader, encode
from moebius_worker.settings import WorkerSettings

_READ_BYTES = 2**20


class EngineProcess:
    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, settings: WorkerSettings) -> "EngineProcess":
        """Starts an engine with the front's own settings. Raises OSError if the machine allows no process."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            command = (sys.executable, "-m", "moebius_worker.engine")
            arguments = ("--fd", str(theirs.fileno()), settings.model_dump_json())
            try:
                process = await asyncio.create_subprocess_exec(
                    *dies_with_us(*command, *arguments),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_BYTES)
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: pb.FrontFrame) -> None:
        """Queues a frame. What can pile up is bounded by the number of requests that are let in."""
        self._writer.write(encode(frame))

    async def frames(self) -> AsyncIterator[pb.EngineFrame]:
        """What the engine says, until it closes its end. Raises FrameError when that cannot be understood."""
        frames = FrameReader()
        while True:
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionResetError:
                return
            if not data:
                return
            for payload in frames.feed(data):
                try:
                    yield pb.EngineFrame.FromString(payload)
                except DecodeError as error:
                    raise FrameError(f"a frame from the engine cannot be decoded: {error}") from error

    async def wait(self) -> int:
        """The exit status, negative for a signal."""
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, which a stopped process cannot ignore; harmless when it is gone."""
        if self._process.returncode is None:
            self._process.kill()
        self._writer.close()
