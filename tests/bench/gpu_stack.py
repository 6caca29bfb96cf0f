"""The whole stack on a GPU: seconds to READY, and what gateway, gRPC and worker leave of the engine's speed.

`make gpu-bench-stack` runs it, with models of true dimensions and random weights (`gpu_engine.py`). The same
requests, all sent at once, go three ways:

- engine: `ModelRunner` alone in a process, no scheduler, no sampler but an arg max, the next token known at
  once; with the plan and the settings of the worker. The prompts, then one step after another. It has the GPU
  to itself, before the worker whose rates are measured starts.
- worker: over one gRPC stream, as a gateway sends them.
- stack: as completions with token ids over HTTP, an SSE stream and a connection each.

A rate is all tokens of the outputs over the time from the first request to the last token, prompts included.
Each is printed as soon as it is known, and requests that do not end are an error, so that a run that is cut
short has said what it found.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import grpc
import orjson
import structlog

from moebius_common.child import dies_with_us
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import WorkerStub
from moebius_worker.front.engine_process import environment
from moebius_worker.sim.vocabulary import vocabulary
from tests.bench.gpu_engine import MODELS, Streams
from tests.bench.rig import Gateway, gateway, machine
from tests.ports import free_port
from tests.waiting import until

# For a look without a GPU.
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 1e6,
}
CONFIGS = MODELS | {"tiny": TINY}
MODEL = "bench"
# Where programs keep what they compile.
CACHES = ("MOEBIUS_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
LONGEST = 9216
# Of those rounds the best counts; before them a short one warms up what is between.
ROUNDS, WARM_UP_TOKENS = 2, 16
# A round that takes longer hangs: on a GPU they take a few.
ROUND_SECONDS = 60.0
START_SECONDS = 420.0


@dataclass(frozen=True)
class Case:
    """`form`: of the weights. `output`: tokens of each answer to `prompt` tokens. `starts`, `rates`: whether
    these are measured."""

    model: str
    form: str
    device: str
    streams: tuple[int, ...]
    prompt: int
    output: int
    starts: bool = True
    rates: bool = True

    @property
    def max_model_len(self) -> int:
        return min(LONGEST, CONFIGS[self.model]["max_position_embeddings"])


# A way for so many streams of a case, in tokens per second; the last argument is told what has come so far.
Through = Callable[[Case, int, Counter[str]], Awaitable[float]]


@dataclass(frozen=True)
class Rate:
    """Of a way: tokens per second with so many streams."""

    way: str
    streams: int
    tokens: float

    def __str__(self) -> str:
        return f"{self.way}, {self.streams} streams: {self.tokens:.0f} tok/s"


@dataclass(frozen=True)
class Start:
    """`seconds` until the worker was READY; `said`: what it said that it did meanwhile, word for word."""

    seconds: float
    said: Mapping[str, float]

    @property
    def phases(self) -> Mapping[str, float]:
        """The same in a few words, in the order in which they came first."""
        found: Counter[str] = Counter()
        for words, seconds in self.said.items():
            compiling = "compiling kernels" in words
            found["compiling" if compiling else words.partition(":")[0]] += seconds
        return dict(found)

    def __str__(self) -> str:
        parts = (f"{phase} {seconds:.1f}" for phase, seconds in self.phases.items() if seconds >= 0.05)
        return f"{self.seconds:.1f} s to READY ({', '.join(parts)})"

    def longest(self, count: int = 12) -> str:
        """What took longest, a line each."""
        ordered = sorted(self.said.items(), key=lambda one: -one[1])[:count]
        return "\n".join(f"{seconds:>8.2f} s  {words}" for words, seconds in ordered)

    def record(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "phases": self.phases}


def write_checkpoint(directory: Path, config: Mapping[str, Any]) -> None:
    """A model without weights, whose tokens are words."""
    files = vocabulary("").files
    tokenizer = json.loads(files["tokenizer.json"])
    tokens = tokenizer["model"]["vocab"]
    tokens |= {f"Ġw{token_id}": token_id for token_id in range(len(tokens), config["vocab_size"])}
    for name, data in files.items() | {("tokenizer.json", json.dumps(tokenizer).encode())}:
        (directory / name).write_bytes(data)
    (directory / "config.json").write_text(json.dumps(dict(config)))


@contextlib.contextmanager
def within(values: Mapping[str, str]) -> Iterator[None]:
    """These environment variables beside those that there are."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True)
class Worker:
    """One that is READY, and how it became so."""

    address: str
    start: Start


@contextlib.asynccontextmanager
async def started(case: Case, model: Path, log: Path) -> AsyncIterator[Worker]:
    address = f"127.0.0.1:{free_port()}"
    begun = time.monotonic()
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *dies_with_us(sys.executable, "-m", "moebius_worker"),
            *("--listen", address, "--model", str(model), "--served-model-name", MODEL),
            *("--load-format", f"dummy:{case.form}", "--device", case.device),
            *("--max-running", str(max(case.streams)), "--max-model-len", str(case.max_model_len)),
            stderr=output,
        )
    try:
        yield Worker(address, await _ready(address, begun, log, lambda: process.returncode))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready(
    address: str, begun: float, log: Path, ended: Callable[[], int | None] = lambda: None
) -> Start:
    """Waits until it is. `ended`: the worker's exit status."""
    said: Counter[str] = Counter()
    last = begun
    # Tried again at once, not seconds later.
    patience = [(f"grpc.{name}_reconnect_backoff_ms", 50) for name in ("initial", "min", "max")]
    async with grpc.aio.insecure_channel(address, options=patience) as channel:
        stub = WorkerStub(channel)
        while True:
            words = "process"
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await stub.GetStatus(pb.GetStatusRequest())
                words = status.load.phase or "engine process"
                if status.state == pb.STATE_READY:
                    return Start(time.monotonic() - begun, dict(said))
                assert status.state != pb.STATE_FAILED, log.read_text()[-4000:]
            assert ended() is None, log.read_text()[-4000:]
            assert time.monotonic() < begun + START_SECONDS, f"not READY:\n{log.read_text()[-4000:]}"
            await asyncio.sleep(0.02)
            now = time.monotonic()
            said[words] += now - last
            last = now


async def restarted(worker: Worker, log: Path) -> Start:
    """Kills the engine: seconds until the front has another one."""
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub = WorkerStub(channel)
        engine = (await stub.GetStatus(pb.GetStatusRequest())).engine_pid
        begun = time.monotonic()
        os.kill(engine, signal.SIGKILL)

        async def noticed() -> bool:
            status = await stub.GetStatus(pb.GetStatusRequest())
            return bool(status.engine_pid != engine)

        await until(noticed, "the engine is gone")
    return await _ready(worker.address, begun, log)


def prompts(case: Case, count: int) -> list[list[int]]:
    """Of random tokens: no two have a prefix in common."""
    size = CONFIGS[case.model]["vocab_size"]
    return [[random.randrange(size) for _ in range(case.prompt)] for _ in range(count)]


def engine_rates(case: Case, model: Path) -> dict[int, float]:
    """Tokens per second of the engine alone, by streams. Runs in a process of its own."""
    from moebius_worker.checkpoint.checkpoint import open_checkpoint
    from moebius_worker.engine.runner import ModelRunner, RunnerOptions
    from moebius_worker.preflight.examine import Wanted
    from moebius_worker.preflight.prepare import prepare

    # The worker has said it all.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    checkpoint = open_checkpoint(str(model))
    options = RunnerOptions(
        device=case.device,
        dummy_weights=case.form,
        max_running=max(case.streams),
        max_model_len=case.max_model_len,
    )
    with tempfile.TemporaryFile() as flights:
        # The worker's plan, found where it was kept.
        kernels = prepare(checkpoint, Wanted(options), flights.fileno(), lambda *_: None)
        runner = ModelRunner.load(checkpoint, options)
        runner.bind(kernels.operations)
        if kernels.plan.choices:
            runner.capture(
                lambda size: size in case.streams and kernels.plan.capturable(size), lambda *_: None
            )
            kernels.warm_up(runner, lambda *_: None)
        rates: dict[int, float] = {}
        for count in case.streams:
            for _ in range(ROUNDS):
                batch = Streams(runner, count, case.prompt, case.output)
                begun = time.perf_counter()
                batch.prefill()
                for _ in range(case.output - 1):
                    batch.decode()
                rate = count * case.output / (time.perf_counter() - begun)
                rates[count] = max(rate, rates.get(count, 0.0))
            print(Rate("engine", count, rates[count]), flush=True)
    return rates


async def through_worker(address: str, case: Case, count: int, seen: Counter[str]) -> float:
    """Tokens per second over gRPC. `seen`: what has come of it until now."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(pb.GatewayFrame(hello=pb.Hello(gateway_id="bench")))
        await call.read()
        sampling = pb.Sampling(top_p=1, repetition_penalty=1, seed=1)
        submits = [
            pb.Submit(
                handle=handle,
                request_id=str(handle),
                token_ids=ids,
                sampling=sampling,
                max_tokens=case.output,
            )
            for handle, ids in enumerate(prompts(case, count))
        ]
        begun = time.perf_counter()
        for submit in submits:
            await call.write(pb.GatewayFrame(submit=submit))
        while seen["ended"] < count:
            frame = await call.read()
            assert isinstance(frame, pb.WorkerFrame), "the worker has closed the stream"
            assert not frame.failures, frame.failures
            seen["tokens"] += sum(len(delta.token_ids) for delta in frame.deltas)
            seen["ended"] += sum(1 for delta in frame.deltas if delta.finish_reason)
        seconds = time.perf_counter() - begun
        call.cancel()
    assert seen["tokens"] == count * case.output, seen
    return seen["tokens"] / seconds


async def through_gateway(front: Gateway, case: Case, count: int, seen: Counter[str]) -> float:
    """Tokens per second over HTTP. `seen`: what has come of it until now."""
    bodies = [
        orjson.dumps(
            {
                "model": MODEL,
                "prompt": ids,
                "max_tokens": case.output,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        for ids in prompts(case, count)
    ]
    begun = time.perf_counter()
    tokens = await asyncio.gather(*(completion_tokens(front, body, seen) for body in bodies))
    seconds = time.perf_counter() - begun
    assert set(tokens) == {case.output}, tokens
    return sum(tokens) / seconds


async def completion_tokens(front: Gateway, body: bytes, seen: Counter[str]) -> int:
    """Reads a stream to its end, which says how many tokens it had."""
    reader, writer = await asyncio.open_connection(front.host, front.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + body)
    tail = b""
    while data := await reader.read(1 << 16):
        seen["bytes"] += len(data)
        tail = (tail + data)[-2048:]
    seen["ended"] += 1
    writer.close()
    found = re.search(rb'"completion_tokens":(\d+)', tail)
    assert found is not None, tail
    return int(found[1])


async def timed(what: str, rate: Callable[[Counter[str]], Awaitable[float]]) -> float:
    """Raises TimeoutError with what has come until then."""
    seen: Counter[str] = Counter()
    try:
        async with asyncio.timeout(ROUND_SECONDS):
            return await rate(seen)
    except TimeoutError:
        came = ", ".join(f"{count} {name}" for name, count in seen.items()) or "nothing"
        raise TimeoutError(f"{what}: no end after {ROUND_SECONDS:.0f} s; came: {came}") from None


async def best(way: str, case: Case, count: int, through: Through) -> float:
    """The rate, which is printed."""
    what, short = f"{way}, {count} streams", replace(case, output=min(case.output, WARM_UP_TOKENS))
    await timed(f"{what}, warming up", lambda seen: through(short, count, seen))
    rounds = [await timed(what, lambda seen: through(case, count, seen)) for _ in range(ROUNDS)]
    print(Rate(way, count, max(rounds)), flush=True)
    return max(rounds)


async def served_rates(address: str, case: Case) -> dict[int, tuple[float, float]]:
    """By streams the rates of the worker and of the stack."""
    begun = time.perf_counter()
    async with gateway([address]) as front:
        print(f"gateway: {time.perf_counter() - begun:.1f} s until it was ready", flush=True)
        ways = {"worker": partial(through_worker, address), "stack": partial(through_gateway, front)}
        found: dict[int, tuple[float, float]] = {}
        for count in case.streams:
            worker, stack = [await best(way, case, count, through) for way, through in ways.items()]
            found[count] = worker, stack
        return found


def _stood_by(log: Path) -> int:
    """How many processes have, to become the next engine."""
    return log.read_text().count("standing by") if log.exists() else 0


def tell(name: str, start: Start) -> Start:
    print(f"{name}: {start}\n{start.longest()}", flush=True)
    return start


async def cold_start(case: Case, model: Path, log: Path) -> Start:
    async with started(case, model, log) as worker:
        return tell("cold", worker.start)


async def served(
    case: Case, model: Path, log: Path
) -> tuple[dict[str, Start], dict[int, tuple[float, float]]]:
    """The starts: the warm one, and that of another engine in a worker that stays; and the rates."""
    before = _stood_by(log)
    async with started(case, model, log) as worker:
        starts = {"warm": tell("warm", worker.start)}
        if case.starts:
            if case.device != "cpu":
                await until(lambda: _stood_by(log) > before, "a process stands by")
            starts["engine"] = tell("engine", await restarted(worker, log))
        return starts, await served_rates(worker.address, case) if case.rates else {}


def measure(case: Case) -> dict[str, Any]:
    """Figures of one model. If starts are among them, in caches that are empty at first."""
    print(
        f"\n{case.model}:{case.form} on {case.device}, {case.prompt} tokens in, {case.output} out", flush=True
    )
    with tempfile.TemporaryDirectory() as folder:
        model, caches, log = Path(folder) / "model", Path(folder) / "caches", Path(folder) / "worker.log"
        model.mkdir()
        write_checkpoint(model, CONFIGS[case.model])
        with within({name: str(caches / name) for name in CACHES if case.starts}):
            starts = {"cold": asyncio.run(cold_start(case, model, log))} if case.starts else {}
            engine: dict[int, float] = {}
            if case.rates:
                # The worker is gone, and its memory is free.
                with within(environment(os.environ)), ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    engine = pool.submit(engine_rates, case, model).result()
            later, rates = asyncio.run(served(case, model, log))
    rows = [
        {
            "streams": count,
            "engine": engine[count],
            "worker": worker,
            "stack": stack,
            "percent": 100 * stack / engine[count],
        }
        for count, (worker, stack) in rates.items()
    ]
    if rows:
        print("streams   engine   worker    stack tok/s   stack/engine (at least 95 %)")
    for row in rows:
        print(
            f"{row['streams']:>7} {row['engine']:>8.0f} {row['worker']:>8.0f} {row['stack']:>8.0f}"
            f" {row['percent']:>14.1f} %",
            flush=True,
        )
    records = {name: start.record() for name, start in (starts | later).items()}
    return {"case": asdict(case), "starts": records, "rates": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["qwen3-30b:nvfp4"], help=f"model:form, of {[*CONFIGS]}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--start-only", action="store_true", help="seconds to READY, no requests")
    only.add_argument(
        "--rates-only", action="store_true", help="one start, with what is in the caches; the requests"
    )
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args(arguments)
    print(machine())
    figures: list[dict[str, Any]] = []
    for name in options.cases:
        model, _, form = name.partition(":")
        case = Case(
            model,
            form or "bf16",
            options.device,
            tuple(options.streams),
            options.prompt,
            options.output,
            starts=not options.rates_only,
            rates=not options.start_only,
        )
        figures.append(measure(case))
        if options.out:
            options.out.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
