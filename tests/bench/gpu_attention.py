"""How long Triton's attention takes on this GPU, and what share of its floor that is.

    python -m tests.bench.gpu_attention [--tune] [--seconds 100]

Each line is one layer: decode as a CUDA graph of several layers whose keys are not in the cache, prefill as a
launch. Floors: each key and value read once at 4.3 TB/s, or 788 TFLOP/s of products.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moebius_kernels.attention_plan import Span
from moebius_kernels.device_plan import AttentionPlanner, DeviceAttentionPlan
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.triton.decode_attention import DecodeTiling, decode_attention
from moebius_kernels.triton.prefill_attention import PrefillTiling, prefill_attention

BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.3e12, 788e12
PAGE = 16
DEVICE = torch.device("cuda")
# Beyond the second-level cache.
COLD_BYTES = 400 << 20
MOST_LAYERS = 48


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    sinks: bool = False
    format: KvFormat = KvFormat.MODEL

    @property
    def in_keys(self) -> bool:
        return self.key_dim != self.value_dim


SHAPES = (
    Shape("32/4 x128", 32, 4, 128, 128),
    Shape("32/4 x128 fp8", 32, 4, 128, 128, format=KvFormat.FP8),
    Shape("64/8 x64 w128", 64, 8, 64, 64, window=128, sinks=True),
    Shape("64/8 x64", 64, 8, 64, 64, sinks=True),
    Shape("16/2 x256", 16, 2, 256, 256),
    Shape("128/1 x576", 128, 1, 576, 512),
)
BATCHES, CONTEXTS = (1, 8, 32, 128), (512, 4096, 32768)
LONGEST_PROMPT = 8192

DECODE_TILINGS: dict[str, Sequence[DecodeTiling]] = {
    "32/4 x128": [
        DecodeTiling(16, keys, 4, 3, least, programs)
        for keys, least, programs in ((128, 128, 528), (128, 128, 264), (64, 128, 528), (128, 256, 396))
    ],
    "32/4 x128 fp8": [DecodeTiling(16, keys, warps, 3) for keys, warps in ((128, 4), (128, 8), (64, 4))],
}  # fmt: skip
PREFILL_TILINGS: dict[str, Sequence[PrefillTiling]] = {
    "32/4 x128": [
        PrefillTiling(128, 128, 8, 3), PrefillTiling(128, 128, 8, 2), PrefillTiling(128, 64, 8, 3),
        PrefillTiling(64, 64, 4, 3), PrefillTiling(64, 64, 4, 2), PrefillTiling(64, 128, 4, 2),
    ],
    "64/8 x64": [PrefillTiling(128, 64, 4, 3), PrefillTiling(64, 64, 4, 3), PrefillTiling(128, 128, 4, 3)],
}  # fmt: skip


def allocate(shape: Shape, pages: int) -> KvPages:
    kv = KvPages.allocate(
        shape.format,
        pages,
        PAGE,
        shape.kv_heads,
        shape.key_dim,
        shape.value_dim,
        torch.bfloat16,
        DEVICE,
        values_in_keys=shape.in_keys,
    )
    for rows in (kv.keys, kv.values):
        if rows is not None:
            block = torch.randn(min(pages, 512), *rows.numbers.shape[1:], device=DEVICE).to(
                rows.numbers.dtype
            )
            for first in range(0, pages, 512):
                rows.numbers[first : first + 512] = block[: pages - first]
            if rows.scales is not None:
                rows.scales.fill_(1.0)
    return kv


def planned(shape: Shape, spans: Sequence[tuple[int, int]]) -> DeviceAttentionPlan:
    numbers = torch.randperm(sum(-(-(start + length) // PAGE) for start, length in spans)).tolist()
    planner = AttentionPlanner(
        max_requests=len(spans), max_rows=sum(length for _, length in spans),
        max_model_len=max(CONTEXTS), page_size=PAGE, window=shape.window, device=DEVICE,
    )  # fmt: skip
    made, at = [], 0
    for start, length in spans:
        count = -(-(start + length) // PAGE)
        made.append(Span(start, length, tuple(numbers[at : at + count])))
        at += count
    return planner.plan(made)


def median_us(launch: Callable[[], Any], repeats: int, calls: int) -> float:
    for _ in range(2):
        launch()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def captured(launch: Callable[[], Any]) -> Callable[[], None]:
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


@dataclass(frozen=True)
class Decode:
    shape: Shape
    batch: int
    context: int

    @property
    def layer_bytes(self) -> int:
        shape, seen = self.shape, min(self.context, self.shape.window or self.context)
        width = shape.key_dim + (0 if shape.in_keys else shape.value_dim)
        return self.batch * seen * shape.kv_heads * width * (2 if shape.format is KvFormat.MODEL else 1)

    @property
    def floor_us(self) -> float:
        flops = 2 * self.batch * self.context * self.shape.heads * (self.shape.key_dim + self.shape.value_dim)
        flops = flops if self.shape.window is None else 0
        return 1e6 * max(self.layer_bytes / BYTES_PER_SECOND, flops / FLOPS_PER_SECOND)

    def run(self, tilings: Sequence[DecodeTiling | None]) -> list[float]:
        shape = self.shape
        plan = planned(shape, [(self.context - 1, 1)] * self.batch)
        pages = self.batch * -(-self.context // PAGE)
        stored = self.layer_bytes * self.context // min(self.context, shape.window or self.context)
        count = max(2, min(MOST_LAYERS, COLD_BYTES // self.layer_bytes, (12 << 30) // stored))
        layers = [allocate(shape, pages) for _ in range(count)]
        q = torch.randn(self.batch, shape.heads, shape.key_dim, device=DEVICE, dtype=torch.bfloat16)
        output = q.new_empty(self.batch, shape.heads, shape.value_dim)
        sinks = torch.randn(shape.heads, device=DEVICE, dtype=torch.bfloat16) if shape.sinks else None

        def timed(tiling: DecodeTiling | None) -> float:
            def launch() -> None:
                for layer in layers:
                    decode_attention(q, layer, plan, output, shape.key_dim**-0.5, None, sinks, tiling)

            try:
                return median_us(captured(launch), 7, count)
            except Exception as error:
                print(f"  {tiling}: {type(error).__name__} {str(error)[-150:]}")
                return float("nan")

        return [timed(tiling) for tiling in tilings]


@dataclass(frozen=True)
class Prefill:
    shape: Shape
    length: int

    @property
    def flops(self) -> float:
        seen = self.length / 2 if self.shape.window is None else self.shape.window
        return 2.0 * self.length * seen * self.shape.heads * (self.shape.key_dim + self.shape.value_dim)

    @property
    def floor_us(self) -> float:
        return 1e6 * self.flops / FLOPS_PER_SECOND

    def run(self, tilings: Sequence[PrefillTiling | None]) -> list[float]:
        shape = self.shape
        plan, kv = planned(shape, [(0, self.length)]), allocate(shape, self.length // PAGE)
        q = torch.randn(self.length, shape.heads, shape.key_dim, device=DEVICE, dtype=torch.bfloat16)
        output = q.new_empty(self.length, shape.heads, shape.value_dim)
        sinks = torch.randn(shape.heads, device=DEVICE, dtype=torch.bfloat16) if shape.sinks else None

        def timed(tiling: PrefillTiling | None) -> float:
            def launch() -> None:
                prefill_attention(q, kv, plan, output, shape.key_dim**-0.5, None, sinks, tiling)

            try:
                return median_us(launch, 7, 1)
            except Exception as error:
                print(f"  {tiling}: {type(error).__name__} {str(error)[-150:]}")
                return float("nan")

        return [timed(tiling) for tiling in tilings]


def jobs(tune: bool) -> list[tuple[Any, Sequence[Any]]]:
    """Cases and the tilings to be tried with each."""
    found: list[tuple[Any, Sequence[Any]]] = []
    for shape in SHAPES:
        sizes = [(1, 512), (1, 4096), (32, 4096)] if tune else [(b, c) for c in CONTEXTS for b in BATCHES]
        tilings = DECODE_TILINGS.get(shape.name, ()) if tune else (None,)
        found += ((Decode(shape, batch, context), tilings) for batch, context in sizes if tilings)
        prompts = PREFILL_TILINGS.get(shape.name, ()) if tune else (None,)
        found += [(Prefill(shape, LONGEST_PROMPT), prompts)] if prompts else []
    return found


def compile_ahead(tune: bool) -> None:
    """In as many processes as there are cores: the cache of compiled kernels is shared."""
    count = max(1, min(16, os.cpu_count() or 1))
    command = [sys.executable, __file__, *(["--tune"] if tune else []), "--compile"]
    for process in [subprocess.Popen([*command, f"{index}/{count}"]) for index in range(count)]:
        process.wait()


def compile_share(tune: bool, share: str) -> None:
    """Every tiling once, with next to no keys."""
    index, count = map(int, share.split("/"))
    small: list[tuple[Any, Any]] = []
    for case, tilings in jobs(tune):
        for tiling in tilings:
            cases = (
                [Prefill(case.shape, 256)]
                if isinstance(case, Prefill)
                else [Decode(case.shape, 1, 512), Decode(case.shape, 600, 16)]
            )
            small += ((one, None if tiling is None else replace(tiling)) for one in cases)
    for case, tiling in list(dict.fromkeys(small))[index::count]:
        case.run([tiling])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--compile")
    parser.add_argument("--seconds", type=float, default=100.0)
    options = parser.parse_args()
    if options.compile:
        compile_share(options.tune, options.compile)
        return
    begin = time.perf_counter()
    compile_ahead(options.tune)
    print(f"compiled in {time.perf_counter() - begin:.0f} s")
    for case, tilings in jobs(options.tune):
        if time.perf_counter() - begin > options.seconds:
            print("out of time")
            return
        label = f"{case.shape.name:14s} " + (
            f"prefill {case.length}" if isinstance(case, Prefill) else f"{case.batch:3d} x {case.context:5d}"
        )
        results = sorted(zip(case.run(tilings), map(str, tilings), strict=True))
        for us, tiling in results[:4] if options.tune else results:
            rate = (
                f"{case.flops / us / 1e6:6.0f} TFLOP/s"
                if isinstance(case, Prefill)
                else f"{case.layer_bytes / us / 1e3:6.0f} GB/s"
            )
            name = tiling.replace("Tiling", "") if options.tune else ""
            print(f"{label} {us:8.1f} us {rate} {100 * case.floor_us / us:5.1f}% {name}", flush=True)


if __name__ == "__main__":
    main()
