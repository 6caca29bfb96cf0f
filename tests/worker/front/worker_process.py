"""A worker as a real process, and a gateway's end of the protocol, for the tests of this folder."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1 import worker_pb2_grpc
from tests.waiting import PATIENCE, until


@dataclass
class WorkerProcess:
    process: asyncio.subprocess.Process
    address: str
    metrics: str | None
    channel: grpc.aio.Channel
    log_file: Path

    def __post_init__(self) -> None:
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)

    async def status(self) -> pb.Status:
        return await self.stub.GetStatus(pb.GetStatusRequest())

    async def ready(self) -> pb.Status:
        return await self.in_state(pb.STATE_READY)

    async def in_state(self, state: pb.State) -> pb.Status:
        async def reached() -> pb.Status | None:
            status = await self.status()
            return status if status.state == state else None

        return await until(reached, f"{pb.State.Name(state)}; log:\n{self.log_file.read_text()}")

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in read_log(self.log_file) if line["event"] == event]


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


@contextlib.asynccontextmanager
async def worker(model: Path | str, log_file: Path, *flags: str) -> AsyncIterator[WorkerProcess]:
    """Starts a worker on a free port; it is not waited for until it is ready. Kills it at the end."""
    with log_file.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moebius_worker"),
            *("--model", str(model), "--listen", "127.0.0.1:0", "--log-format", "json"),
            *("--device", "cpu", "--threads", "1", "--kv-cache-memory", "2MiB"),
            *flags,
            stderr=stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def listening() -> dict[str, Any] | None:
        assert process.returncode is None, log_file.read_text()
        return next((line for line in read_log(log_file) if line["event"] == "listening"), None)

    try:
        line = await until(listening, "listening")
        async with grpc.aio.insecure_channel(line["address"]) as channel:
            yield WorkerProcess(process, line["address"], line["metrics"], channel, log_file)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def submit(handle: int, token_ids: Sequence[int] = (5, 6, 7), **fields: Any) -> pb.Submit:
    """Greedy, 16 tokens, no stop tokens, unless told otherwise."""
    sampling = pb.Sampling(top_p=1, repetition_penalty=1, seed=1)
    defaults = {"max_tokens": 16, "sampling": sampling, "request_id": f"request-{handle}"}
    return pb.Submit(handle=handle, token_ids=token_ids, **(defaults | fields))


@dataclass
class Answer:
    """What came for one handle."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finish_reason: int = pb.FINISH_REASON_UNSPECIFIED
    error: pb.Error | None = None
    frames: int = 0

    @property
    def ended(self) -> bool:
        return bool(self.finish_reason) or self.error is not None


async def end_of(call: grpc.aio.StreamStreamCall) -> grpc.StatusCode:
    """Reads and drops what comes until the stream ends; returns how."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async with asyncio.timeout(PATIENCE):
            while await call.read() is not grpc.aio.EOF:
                pass
    return await call.code()


class Gateway:
    """The gateway's end of an Attach stream: collects what comes by handle."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = worker_pb2_grpc.WorkerStub(channel).Attach()
        self.answers: dict[int, Answer] = {}
        self.statuses: list[pb.Status] = []
        self.frames = 0
        self.code: grpc.StatusCode | None = None
        self._reader: asyncio.Task[None] | None = None

    async def attach(self, gateway_id: str = "test") -> None:
        await self._call.write(pb.GatewayFrame(hello=pb.Hello(gateway_id=gateway_id)))
        first = await self._call.read()
        assert first.HasField("status")
        self.statuses.append(first.status)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            try:
                frame = await self._call.read()
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                frame = grpc.aio.EOF
            if frame is grpc.aio.EOF:
                self.code = await self._call.code()
                return
            self.frames += 1
            if frame.HasField("status"):
                self.statuses.append(frame.status)
            for delta in frame.deltas:
                answer = self.answers.setdefault(delta.handle, Answer())
                assert not answer.ended, "a delta after the end"
                answer.token_ids += delta.token_ids
                answer.logprobs += delta.logprobs
                answer.finish_reason = delta.finish_reason
                answer.frames += 1
            for failure in frame.failures:
                answer = self.answers.setdefault(failure.handle, Answer())
                assert not answer.ended, "a failure after the end"
                answer.error = failure.error

    async def submit(self, *requests: pb.Submit) -> None:
        for request in requests:
            await self._call.write(pb.GatewayFrame(submit=request))

    async def cancel(self, handle: int) -> None:
        await self._call.write(pb.GatewayFrame(cancel=pb.Cancel(handle=handle)))

    def answer(self, handle: int) -> Answer:
        return self.answers.setdefault(handle, Answer())

    async def ended(self, handle: int) -> Answer:
        await until(lambda: self.answer(handle).ended, f"the end of {handle}")
        return self.answer(handle)

    async def streaming(self, handle: int, tokens: int = 2) -> None:
        """Waits until so many tokens have come."""
        await until(lambda: len(self.answer(handle).token_ids) >= tokens, f"tokens of {handle}")

    async def generate(self, request: pb.Submit) -> Answer:
        await self.submit(request)
        return await self.ended(request.handle)

    def close(self) -> None:
        self._call.cancel()


@contextlib.asynccontextmanager
async def attached(worker: WorkerProcess) -> AsyncIterator[Gateway]:
    """A gateway over a channel of its own."""
    async with grpc.aio.insecure_channel(
        worker.address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        gateway = Gateway(channel)
        await gateway.attach()
        try:
            yield gateway
        finally:
            gateway.close()


def standing_by(front: int, engine: int) -> int:
    """The process of this front that waits to become its next engine; 0 if there is none."""
    for child in psutil.Process(front).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid != engine and "--standby" in child.cmdline():
                return child.pid
    return 0


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
