"""The whole engine on a GPU: decode and prefill of models of true dimensions with random weights.

`make gpu-bench` runs it. Prints tokens per second beside the floor: the bytes that a step must read, at
4.3 TB/s, with as many experts as uniform routing hits; of a prompt the operations of its products in bf16, at
790 TFLOP/s, without the attention's scores.
"""

import argparse
import cProfile
import json
import math
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moebius_kernels.operations import OPERATION_NAMES, Operations
from moebius_kernels.registry import gather
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.parameters import Matrix, Shard
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice, StateStep

BANDWIDTH, FLOPS = 4.3e12, 790e12
# The published configs.
CONFIGS = Path(__file__).parents[1] / "data" / "configs"
MODELS: dict[str, dict[str, Any]] = {
    name: json.loads((CONFIGS / f"{file}.json").read_text())
    for name, file in {
        "qwen3-30b": "Qwen3-30B-A3B",
        "gpt-oss-20b": "gpt-oss-20b",
        "gemma-4-26b": "gemma-4-26B-A4B-it",
        # Qwen3.6-35B-A3B has the same sizes.
        "qwen3.6-35b": "Qwen3.5-35B-A3B",
    }.items()
}
CASES = (
    *(f"qwen3-30b:{form}" for form in ("bf16", "fp8", "nvfp4", "q4_0", "q4_k")),
    *("gpt-oss-20b:mxfp4", "gemma-4-26b:nvfp4", "qwen3.6-35b:nvfp4"),
)
PROMPT, OUTPUT = 128, 256
STREAMS = (1, 8, 32, 64, 128)


def unproven(prefer: str) -> Operations:
    """The backends named `prefer` wherever there is one: a benchmark need not wait for the preflight."""
    registry = gather()
    for module, reason in registry.missing.items():
        print(f"not here: {module}: {reason}")
    chosen = {}
    for name in OPERATION_NAMES:
        backends = {backend.name: backend for backend in registry.of(name)}
        chosen[name] = backends.get(prefer, backends["reference"]).bind()
    print(
        "by the reference:",
        *(name for name in OPERATION_NAMES if "reference" in str(chosen[name].__module__)),
    )
    return Operations(**chosen)


def shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """With its first layers only."""
    if "text_config" in config:
        return config | {"text_config": shortened(config["text_config"], layers)}
    fewer = config | {"num_hidden_layers": layers}
    if "layer_types" in config:
        fewer["layer_types"] = config["layer_types"][:layers]
    return fewer


def load(config: dict[str, Any], form: str, layers: int | None) -> ModelRunner:
    if layers is not None:
        config = shortened(config, layers)
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        options = RunnerOptions(
            device="cuda",
            dtype="bfloat16",
            dummy_weights=form,
            max_running=max(STREAMS),
            max_model_len=9216,
            max_step_tokens=8192,
        )
        return ModelRunner.load(open_checkpoint(directory), options)


def floor(runner: ModelRunner, streams: int) -> float:
    """Seconds of a step, see `step_bytes`."""
    return step_bytes(runner._model, streams) / BANDWIDTH


def step_bytes(model: Decoder, streams: int) -> float:
    """Of the experts that are hit, of everything else once, of keys and values at the mean length, and of
    linear states, which are read and written."""
    routed = others = 0
    for matrix in {slot.owner for slot in model.slots().values()}:
        nbytes = sum(tensor.nbytes for tensor in matrix.tensors)
        if isinstance(matrix, Matrix) and matrix.shard is Shard.EXPERT:
            routed += nbytes
        elif matrix is not model.embedding or model.head is model.embedding:
            others += nbytes
    hit = 1 - (1 - model.expert_share) ** streams
    context = PROMPT + OUTPUT / 2
    specs = model.caches.kv
    kept = sum(2 * 2 * spec.kv_heads * spec.key_dim * min(context, spec.window or context) for spec in specs)
    kept += 2 * model.caches.state_bytes(torch.bfloat16)
    return float(routed * hit + others + streams * kept)


def prefill_operations(model: Decoder, tokens: int) -> float:
    """Of the products with matrices; the head is needed once."""
    numbers = 0.0
    for matrix in {slot.owner for slot in model.slots().values()} - {model.embedding, model.head}:
        if isinstance(matrix, Matrix) and not matrix.host:
            share = model.expert_share if matrix.shard is Shard.EXPERT else 1.0
            numbers += share * sum(math.prod(block.shape) for block in matrix.blocks)
    return 2 * numbers * tokens


class Streams:
    def __init__(self, runner: ModelRunner, count: int, prompt: int, output: int = OUTPUT) -> None:
        self.runner, self.count = runner, count
        size = runner.layout.page_size
        each = -(-(prompt + output + 1) // size)
        self.pages = [tuple(range(i * each, (i + 1) * each)) for i in range(count)]
        window_total = max(runner.layout.num_window_pages, 1)
        self.windows = [tuple(page % window_total for page in pages) for pages in self.pages]
        self.prompt = prompt
        self.tokens = [i % runner.vocab_size for i in range(count)]
        self.at = prompt

    def slice(self, index: int, ids: tuple[int, ...], start: int) -> Slice:
        windows = self.windows[index] if self.runner.layout.window is not None else ()
        state = StateStep(index) if self.runner.layout.state_slots else None
        return Slice(index, ids, start, self.pages[index], sample=True, window_pages=windows, state=state)

    def prefill(self) -> None:
        generator = torch.Generator().manual_seed(0)
        for first in range(0, self.count, max(1, self.runner.max_step_tokens // self.prompt)):
            last = min(first + max(1, self.runner.max_step_tokens // self.prompt), self.count)
            slices = []
            for index in range(first, last):
                ids = torch.randint(0, self.runner.vocab_size, (self.prompt,), generator=generator)
                slices.append(self.slice(index, tuple(ids.tolist()), 0))
            logits = self.runner.step(slices).logits
            self.tokens[first:last] = logits.argmax(-1).tolist()

    def decode(self) -> None:
        slices = [self.slice(i, (token,), self.at) for i, token in enumerate(self.tokens)]
        self.tokens = self.runner.step(slices).logits.argmax(-1).tolist()
        self.at += 1


def timed(work: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def replays(runner: ModelRunner, streams: int) -> float:
    """Seconds of a step's graph alone, once more and once more."""
    assert runner._graphs is not None
    graph, _ = runner._graphs._graphs[streams]

    def several() -> None:
        for _ in range(10):
            graph.replay()

    several()
    return timed(several) / 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, help="model:form")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    parser.add_argument("--steps", type=int, default=OUTPUT - 16, help="decode steps that are timed")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--profile", action="store_true", help="the kernels of a decode step of each size")
    parser.add_argument("--host", action="store_true", help="where the CPU is in decode steps of each size")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    arguments = parser.parse_args()
    figures: list[dict[str, Any]] = []
    operations = unproven(arguments.backend)
    for case in arguments.cases:
        name, _, form = case.partition(":")
        start = time.perf_counter()
        runner = load(MODELS[name], form, arguments.layers)
        loaded = time.perf_counter() - start
        runner.bind(operations)
        if not arguments.no_graphs:
            runner.capture(lambda size: size in STREAMS, lambda *_: None)
        ready = time.perf_counter() - start
        memory = torch.cuda.max_memory_allocated() / 2**30
        print(f"\n{case}: loaded {loaded:.1f} s, ready {ready:.1f} s, {memory:.1f} GiB")
        for streams in STREAMS:
            batch = Streams(runner, streams, PROMPT)
            batch.prefill()
            for _ in range(8):
                batch.decode()
            steps = [timed(batch.decode) for _ in range(arguments.steps)]
            step, least = statistics.median(steps), floor(runner, streams)
            device = "" if arguments.no_graphs else f"{replays(runner, streams) * 1e3:>7.3f} on the device, "
            print(
                f"decode {streams:>4} streams: {streams / step:>9.0f} tok/s  {step * 1e3:>7.3f} ms a step, "
                f"{device}floor {least * 1e3:>6.3f} ms ({least / step:.0%})",
                flush=True,
            )
            figures.append(
                {
                    "case": case,
                    "streams": streams,
                    "tokens_per_s": streams / step,
                    "ms": step * 1e3,
                    "floor_ms": least * 1e3,
                    "floor": least / step,
                }
            )
            if arguments.profile:
                profile(batch.decode)
            if arguments.host:
                profile_host(batch.decode)
        long = Streams(runner, 1, 8192)
        long.prefill()
        times = [timed(long.prefill) for _ in range(3)]
        taken, least = statistics.median(times), prefill_operations(runner._model, 8192) / FLOPS
        print(
            f"prefill 8192: {8192 / taken:.0f} tok/s, {taken * 1e3:.1f} ms, floor {least * 1e3:.1f} ms "
            f"({least / taken:.0%})",
            flush=True,
        )
        figures.append(
            {
                "case": case,
                "prefill": 8192,
                "tokens_per_s": 8192 / taken,
                "ms": taken * 1e3,
                "floor_ms": least * 1e3,
                "floor": least / taken,
            }
        )
        if arguments.profile:
            profile(long.prefill)
        del runner, long, batch
        torch.cuda.empty_cache()
        if arguments.out:
            arguments.out.write_text(json.dumps(figures, indent=1))


def profile_host(work: Callable[[], None]) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20):
        work()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


def profile(work: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)[:24]
    for row in rows:
        print(f"    {row.self_device_time_total:>9.0f} us {row.count:>5} x {row.key[:90]}")


if __name__ == "__main__":
    main()
