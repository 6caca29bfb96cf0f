"""An engine process as the front holds it: started over a socket pair, read without blocking, killed."""

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import IO, Protocol

from google.protobuf.message import DecodeError

from moebius_common.child import dies_with_us
from moebius_proto.worker.v1 import engine_pb2 as pb
from moebius_worker.flight_recorder import Flight, read_flights
from moebius_worker.framing import FrameError, FrameReader, encode
from moebius_worker.settings import WorkerSettings

_READ_BYTES = 2**20
# Turns for which threads of PyTorch (GNU OpenMP) watch for one another before they sleep: some 50 us instead
# of some 10 ms. On a machine that has other things to do, one thread of a step waits for its CPU while the
# others burn theirs: steps of 20 ms were seen to take 2 s.
_SPINS = "1000"


class Process(Protocol):
    """What is needed of an asyncio.subprocess.Process."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


class EngineProcess:
    def __init__(
        self,
        process: Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        flights: IO[bytes] | None = None,
    ) -> None:
        """`flights`: the open file of the engine's flight recorder."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._flights = flights

    @classmethod
    async def start(cls, settings: WorkerSettings) -> "EngineProcess":
        """Starts an engine with the front's own settings. Raises OSError if the machine allows no process."""
        started = await start_process(settings)
        return await cls.connected(started.process, started.connection, started.flights)

    @classmethod
    async def connected(
        cls, process: Process, connection: socket.socket, flights: IO[bytes] | None = None
    ) -> "EngineProcess":
        """`connection`: our end of the socket pair, not blocking."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=_READ_BYTES)
        return cls(process, reader, writer, flights)

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

    def last_flights(self) -> list[Flight]:
        """What the engine did last, the latest first; also when it is dead."""
        return [] if self._flights is None else read_flights(self._flights.fileno())

    async def wait(self) -> int:
        """The exit status, negative for a signal."""
        return await self._process.wait()

    def kill(self) -> None:
        """SIGKILL, which a stopped process cannot ignore; harmless when it is gone."""
        if self._process.returncode is None:
            self._process.kill()
        self._writer.close()


@dataclass(frozen=True)
class StartedProcess:
    """`connection`: our end of the socket pair, not blocking. `flights`: as of EngineProcess."""

    process: asyncio.subprocess.Process
    connection: socket.socket
    flights: IO[bytes]


async def start_process(
    settings: WorkerSettings, *flags: str, stdin: int = asyncio.subprocess.DEVNULL
) -> StartedProcess:
    """An engine's process, to which nobody listens yet. Raises OSError if the machine allows none."""
    flights = tempfile.TemporaryFile()  # noqa: SIM115 (it is the engine's as long as that is ours)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        descriptors = (theirs.fileno(), flights.fileno())
        command = (
            *(sys.executable, "-m", "moebius_worker.engine"),
            *("--fd", str(descriptors[0]), "--flights", str(descriptors[1]), *flags),
            settings.model_dump_json(),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *dies_with_us(*command), pass_fds=descriptors, stdin=stdin, env=environment(os.environ)
            )
        except BaseException:
            ours.close()
            flights.close()
            raise
    return StartedProcess(process, ours, flights)


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Of an engine: ours, unless it says itself how threads are to wait."""
    said = given.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    return dict(given) if said else {**given, "GOMP_SPINCOUNT": _SPINS}
