"""A worker without a model: speaks worker.proto, draws each token from (all tokens before it, seed).

In a test's process: `async with serving(StandIn(Plan())) as port`. As a process of its own, to be killed
with real signals:

    python -m tests.gateway.worker_standin --rate 60

which prints its address on the first line.
"""

import argparse
import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tests.ports import free_port

# What it generates: ids of printable ASCII in the tokenizer of tests.tiny. From END_TOKEN on they occur in
# prompts only, so that a killer among them is never generated.
FIRST_TOKEN, END_TOKEN, VOCAB_SIZE = 3, 97, 384
SERVER_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
)


def next_token(state: int) -> int:
    return FIRST_TOKEN + (state >> 20) % (END_TOKEN - FIRST_TOKEN)


def advance(state: int, token: int) -> int:
    """The state after one more token of the history."""
    return (state * 6364136223846793005 + token + 1442695040888963407) & (2**64 - 1)


def state_of(token_ids: Sequence[int], seed: int) -> int:
    state = seed + 1
    for token in token_ids:
        state = advance(state, token)
    return state


def undisturbed(
    prompt: Sequence[int], seed: int, max_tokens: int, stop: Sequence[int] = ()
) -> tuple[int, ...]:
    """What a generation must give, whatever happens to workers meanwhile."""
    state, tokens = state_of(prompt, seed), []
    while len(tokens) < max_tokens:
        tokens.append(next_token(state))
        state = advance(state, tokens[-1])
        if tokens[-1] in stop:
            break
    return tuple(tokens)


@dataclass(frozen=True)
class Plan:
    """How the stand-in behaves.

    `rate`: steps a second. `killers`: tokens whose presence in a step ends the engine, or, if `exits`, the
    whole process without a word. `beat`: seconds from one status to the next if nothing changes.
    """

    rate: float = 200.0
    model: str = "standin"
    killers: frozenset[int] = frozenset()
    exits: bool = False
    restart_seconds: float = 0.05
    beat: float = 0.5
    max_running: int = 64
    max_model_len: int = 4096
    page_size: int = 16
    tokenizer: tuple[tuple[str, bytes], ...] = (("tokenizer.json", b"{}"),)
    tokenizer_hash: str = "hash"


@dataclass(eq=False)
class Running:
    handle: int
    submit: pb.Submit
    state: int
    generated: int
    stream: "Stream"

    def holds(self, tokens: frozenset[int]) -> bool:
        return not tokens.isdisjoint(self.submit.token_ids)


@dataclass(eq=False)
class Stream:
    """One gateway's Attach."""

    # None ends it.
    outbox: "asyncio.Queue[pb.WorkerFrame | None]" = field(default_factory=asyncio.Queue)
    running: dict[int, Running] = field(default_factory=dict)


class StandIn(WorkerServicer):
    """The servicer, and the controls of its faults."""

    def __init__(self, plan: Plan, name: str = "w") -> None:
        self.plan = plan
        self.name = name
        self.starts = 1
        self.state = pb.STATE_READY
        self.step = 0
        # Controls: say nothing at all; answer submits with this instead; compute nothing.
        self.silent = False
        self.refusal: pb.Error | None = None
        self.paused = False
        # Everything that was ever asked of it.
        self.submits: list[pb.Submit] = []
        self.cancels: list[int] = []
        self._streams: set[Stream] = set()
        self._quarantine_turn = itertools.cycle((False, True))

    @property
    def incarnation(self) -> str:
        return f"{self.name}-{self.starts}"

    @property
    def running(self) -> list[Running]:
        return [one for stream in self._streams for one in stream.running.values()]

    @property
    def gateways(self) -> int:
        return len(self._streams)

    def status(self) -> pb.Status:
        return pb.Status(
            incarnation=self.incarnation,
            state=self.state,
            step=self.step,
            running=len(self.running),
            max_running=self.plan.max_running,
            pid=os.getpid(),
        )

    # ---- faults -------------------------------------------------------------------------------------

    async def die(self, suspects: frozenset[int] | None = None, reason: int = pb.REASON_ENGINE_DEAD) -> None:
        """The engine dies during a step with `suspects` (handles; all by default), and is started again."""
        self.state = pb.STATE_RESTARTING
        for stream in self._streams:
            frame = pb.WorkerFrame(status=self.status())
            for one in stream.running.values():
                in_step = suspects is None or one.handle in suspects
                error = pb.Error(
                    reason=reason,
                    message="killed",
                    retryable=True,
                    in_step=in_step,
                    tokens_sent=one.generated,
                )
                frame.failures.add(handle=one.handle, error=error)
            stream.running.clear()
            stream.outbox.put_nowait(frame)
        await asyncio.sleep(self.plan.restart_seconds)
        self.restart()

    def restart(self) -> None:
        """A new incarnation; what ran in the old one is forgotten, without a word about it."""
        self.starts += 1
        for stream in self._streams:
            stream.running.clear()
        self.become(pb.STATE_READY)

    def become(self, state: int) -> None:
        self.state = state
        for stream in self._streams:
            stream.outbox.put_nowait(pb.WorkerFrame(status=self.status()))

    def hang_up(self) -> None:
        """Ends all streams; what ran on them is forgotten."""
        for stream in self._streams:
            stream.running.clear()
            stream.outbox.put_nowait(None)

    def send(self, *deltas: pb.Delta) -> None:
        """Says something out of turn."""
        for stream in self._streams:
            stream.outbox.put_nowait(pb.WorkerFrame(deltas=deltas))

    # ---- the engine ---------------------------------------------------------------------------------

    async def run(self) -> None:
        told = 0.0
        due = time.monotonic()
        while True:
            # Steps that a pause of this process took are not made up for: streams would end in a burst.
            due = max(due + 1 / self.plan.rate, time.monotonic())
            await asyncio.sleep(max(due - time.monotonic(), 0))
            if self.state == pb.STATE_READY and not self.paused and (batch := self._batch()):
                await self._compute(batch)
            if time.monotonic() - told > self.plan.beat:
                told = time.monotonic()
                for stream in self._streams:
                    stream.outbox.put_nowait(pb.WorkerFrame(status=self.status()))

    def _batch(self) -> list[Running]:
        """All that are not quarantined, or one that is; the two kinds alternate when both are there."""
        alone = [one for one in self.running if one.submit.quarantined]
        together = [one for one in self.running if not one.submit.quarantined]
        if alone and (not together or next(self._quarantine_turn)):
            return [alone[self.step % len(alone)]]
        return together

    async def _compute(self, batch: Sequence[Running]) -> None:
        self.step += 1
        if any(one.holds(self.plan.killers) for one in batch):
            if self.plan.exits:
                os._exit(137)
            await self.die(frozenset(one.handle for one in batch))
            return
        frames: dict[int, tuple[Stream, pb.WorkerFrame]] = {}
        for one in batch:
            _, frame = frames.setdefault(id(one.stream), (one.stream, pb.WorkerFrame()))
            frame.deltas.append(self._advance(one))
        for stream, frame in frames.values():
            stream.outbox.put_nowait(frame)

    def _advance(self, one: Running) -> pb.Delta:
        token = next_token(one.state)
        one.state = advance(one.state, token)
        one.generated += 1
        delta = pb.Delta(handle=one.handle, token_ids=[token])
        if one.generated == one.submit.resumed + 1:
            delta.cached_tokens = len(one.submit.token_ids) // 2
        if one.submit.sampling.HasField("logprobs"):
            delta.logprobs.add(logprob=-token / 100)
        if token in one.submit.stop_token_ids and one.generated > one.submit.min_tokens:
            delta.finish_reason = pb.FINISH_REASON_STOP
        elif one.generated >= one.submit.max_tokens:
            delta.finish_reason = pb.FINISH_REASON_LENGTH
        if delta.finish_reason:
            del one.stream.running[one.handle]
        return delta

    # ---- the protocol -------------------------------------------------------------------------------

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.GatewayFrame], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerFrame]:
        stream = Stream()
        stream.outbox.put_nowait(pb.WorkerFrame(status=self.status()))
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            while (frame := await stream.outbox.get()) is not None:
                if not self.silent:
                    yield frame
        finally:
            reader.cancel()
            self._streams.discard(stream)

    async def _read(self, requests: AsyncIterator[pb.GatewayFrame], stream: Stream) -> None:
        async for frame in requests:
            if frame.HasField("submit"):
                self._submit(frame.submit, stream)
            elif frame.HasField("cancel"):
                self.cancels.append(frame.cancel.handle)
                stream.running.pop(frame.cancel.handle, None)

    def _submit(self, submit: pb.Submit, stream: Stream) -> None:
        self.submits.append(submit)
        refusal = self.refusal
        if refusal is None and self.state != pb.STATE_READY:
            refusal = pb.Error(reason=pb.REASON_NOT_READY, message="no engine", retryable=True)
        if refusal is not None:
            failure = pb.Failure(handle=submit.handle, error=refusal)
            failure.error.tokens_sent = submit.resumed
            stream.outbox.put_nowait(pb.WorkerFrame(failures=[failure]))
            return
        state = state_of(submit.token_ids, submit.sampling.seed)
        stream.running[submit.handle] = Running(submit.handle, submit, state, submit.resumed, stream)

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.Model:  # noqa: N802
        return pb.Model(
            id=self.plan.model,
            architecture="StandIn",
            tokenizer_hash=self.plan.tokenizer_hash,
            max_model_len=self.plan.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[2],
            page_size=self.plan.page_size,
        )

    async def GetTokenizer(  # noqa: N802
        self, request: pb.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.FileChunk]:
        if request.tokenizer_hash != self.plan.tokenizer_hash:
            await context.abort(grpc.StatusCode.NOT_FOUND, "another tokenizer")
        for name, data in self.plan.tokenizer:
            for start in range(0, len(data), 1 << 16):
                yield pb.FileChunk(name=name, data=data[start : start + (1 << 16)])

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.Status:  # noqa: N802
        return self.status()


@asynccontextmanager
async def serving(worker: StandIn, port: int = 0) -> AsyncIterator[int]:
    """Serves it on loopback; yields the port. Leaving resets all streams, as a death of the process would."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(worker, server)
    port = server.add_insecure_port(f"127.0.0.1:{port or free_port()}")
    await server.start()
    engine = asyncio.create_task(worker.run())
    try:
        yield port
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        await server.stop(None)


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--rate", type=float, default=200.0, help="steps a second")
    parser.add_argument(
        "--killer", type=int, action="append", default=[], help="a token that ends the process"
    )
    parser.add_argument("--tokenizer", type=Path, help="directory with the files to serve")
    arguments = parser.parse_args()
    plan = Plan(rate=arguments.rate, killers=frozenset(arguments.killer), exits=True)
    if arguments.tokenizer:
        files = sorted(arguments.tokenizer.iterdir())
        plan = Plan(
            rate=arguments.rate,
            killers=plan.killers,
            exits=True,
            tokenizer=tuple((file.name, file.read_bytes()) for file in files),
        )
    async with serving(StandIn(plan, name=f"p{os.getpid()}"), arguments.port) as port:
        print(f"127.0.0.1:{port}", flush=True)  # noqa: T201
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
