"""The whole engine on a GPU: decode and prefill of models of true dimensions with random weights.

`make gpu-bench` runs it. Prints tokens per second beside the floor: the bytes that a step must read, at
4.3 TB/s, with as many experts as uniform routing hits.
"""

import argparse
import cProfile
import json
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
from moebius_worker.engine.models.moe import MoeDecoder
from moebius_worker.engine.models.parameters import Matrix, Shard
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice

BANDWIDTH = 4.3e12
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
MODELS = {"qwen3-30b": QWEN3_30B, "gpt-oss-20b": GPT_OSS_20B}
PROMPT, OUTPUT = 128, 256
STREAMS = (1, 8, 32, 64, 128)


def unproven(prefer: str) -> Operations:
    """The backends named `prefer` wherever there is one: a benchmark need not wait for the preflight."""
    registry = gather()
    for module, reason in registry.missing.items():
        print(f"not here: {module}: {reason}")
    chosen = {}
    for name in OPERATION_NAMES:
        functions = {backend.name: backend.function for backend in registry.of(name)}
        chosen[name] = functions.get(prefer, functions["reference"])
    print(
        "by the reference:",
        *(name for name in OPERATION_NAMES if "reference" in str(chosen[name].__module__)),
    )
    return Operations(**chosen)


def load(config: dict[str, Any], form: str, layers: int | None) -> ModelRunner:
    if layers is not None:
        config = config | {"num_hidden_layers": layers}
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
    """Seconds of a step: experts that are hit, everything else once, keys and values at the mean length."""
    model = runner._model
    routed = others = 0
    for matrix in {slot.owner for slot in model.slots().values()}:
        nbytes = sum(tensor.nbytes for tensor in matrix.tensors)
        if isinstance(matrix, Matrix) and matrix.shard is Shard.EXPERT:
            routed += nbytes
        elif matrix is not model.embedding or model.head is model.embedding:
            others += nbytes
    assert isinstance(model, MoeDecoder)
    hit = 1 - (1 - model.moe.per_token / model.moe.total) ** streams
    context = PROMPT + OUTPUT / 2
    specs = model.caches.kv
    kept = sum(2 * 2 * spec.kv_heads * spec.key_dim * min(context, spec.window or context) for spec in specs)
    return float((routed * hit + others + streams * kept) / BANDWIDTH)


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
        return Slice(index, ids, start, self.pages[index], sample=True, window_pages=windows)

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
    parser.add_argument("cases", nargs="*", default=["qwen3-30b:nvfp4"], help="model:form")
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
                {"case": case, "streams": streams, "tokens_per_s": streams / step, "floor": least / step}
            )
            if arguments.profile:
                profile(batch.decode)
            if arguments.host:
                profile_host(batch.decode)
        long = Streams(runner, 1, 8192)
        long.prefill()
        times = [timed(long.prefill) for _ in range(3)]
        rate = 8192 / statistics.median(times)
        print(f"prefill 8192: {rate:.0f} tok/s", flush=True)
        figures.append({"case": case, "prefill": 8192, "tokens_per_s": rate})
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
