"""Routed experts alone on the GPU: correctness at true dimensions, microseconds, and the tilings' table.

    python -m tests.bench.gpu_experts [--shapes qwen3 ...] [--formats nvfp4_words ...] [--tokens 1 8 ...]
        [--tune kernels/moebius_kernels/triton/tables/hopper.json]

Each figure is the median of replays of a CUDA graph that runs once through several sets of weights, more than
the L2 holds, and has everything in it between the router's output and the layer's: alignment, gate and up,
activation, down, weighted sum. Routing is uniform. Floors: bytes of the experts that were hit at 4.3 TB/s, or
operations at 790 TFLOP/s, whichever is longer.
"""

import argparse
import contextlib
import itertools
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from moebius_kernels.activations import SILU
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.router import Route, topk_softmax
from moebius_kernels.triton.expert_tiling import Measurement, expert_tiling, read_table, write_table
from moebius_kernels.triton.experts import shape_of, tiled_experts
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from tests.bench.compiling import compile_side_by_side
from tests.kernels.triton.matrices import FORMATS, random_matrix

BANDWIDTH, FLOPS = 4.3e12, 790e12
DEVICE = torch.device("cuda")
# Such a relative error is a fault, and no rounding.
WRONG = 0.02


@dataclass(frozen=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    inner: int


SHAPES = {
    "qwen3": Shape(128, 8, 2048, 768),
    "qwen3.6": Shape(256, 8, 2048, 512),
    "flash": Shape(512, 10, 2560, 640),
    "gemma": Shape(128, 8, 2816, 704),
    "gpt-oss": Shape(32, 4, 2880, 2880),
}


def make(format, shape: Shape, sets: int) -> list[ExpertWeights]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [
        ExpertWeights(
            [random_matrix(format, (shape.experts, 2 * shape.inner, shape.hidden), generator)],
            random_matrix(format, (shape.experts, shape.hidden, shape.inner), generator),
        )
        for _ in range(sets)
    ]


def inputs(shape: Shape, tokens: int, seed: int = 0) -> tuple[torch.Tensor, Route]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=generator, device=DEVICE).bfloat16()
    logits = torch.randn(tokens, shape.experts, generator=generator, device=DEVICE)
    return x, topk_softmax(logits, shape.top_k)


def expected(x: torch.Tensor, route: Route, weights: ExpertWeights) -> torch.Tensor:
    """fp32, an expert at a time."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for expert in route.experts.unique().tolist():
        token, k = (route.experts == expert).nonzero(as_tuple=True)
        gate, up = (x[token].float() @ weights.gate_up[0][expert].dequantize().T).chunk(2, -1)
        middle = torch.nn.functional.silu(gate) * up
        output = middle @ weights.down[expert].dequantize().T
        y.index_add_(0, token, output * route.weights[token, k, None])
    return y


def error(weights: ExpertWeights, shape: Shape, tokens: int, tiling: ExpertTiling) -> float:
    x, route = inputs(shape, tokens, seed=tokens + 1)
    reference = expected(x, route, weights)
    y = tiled_experts(x, route, weights, SILU, tiling)
    return float((y.float() - reference).norm() / reference.norm())


def microseconds(
    weights: list[ExpertWeights], shape: Shape, tokens: int, tiling: ExpertTiling, repeats: int
) -> float:
    given = [inputs(shape, tokens, seed) for seed in range(len(weights))]
    for (x, route), layer in zip(given, weights, strict=True):
        tiled_experts(x, route, layer, SILU, tiling)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (x, route), layer in zip(given, weights, strict=True):
            tiled_experts(x, route, layer, SILU, tiling)
    return replay(graph, repeats) / len(weights)


def replay(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Median microseconds."""
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def floor(weights: ExpertWeights, shape: Shape, tokens: int) -> tuple[float, float]:
    """Microseconds, and bytes of the experts hit."""
    hit = inputs(shape, tokens)[1].experts.unique().numel()
    size = hit * (weights.gate_up[0].nbytes + weights.down.nbytes) / shape.experts
    operations = 6 * tokens * shape.top_k * shape.hidden * shape.inner
    return 1e6 * max(size / BANDWIDTH, operations / FLOPS), size


def sets_for(format, shape: Shape) -> int:
    row = StoredMatrix.empty(format, (shape.hidden, shape.inner), torch.device("meta"))
    return 12 if 3 * row.nbytes * shape.experts < 5e8 else 6


def candidates(format: str, tokens_a_slot: float) -> dict[int, tuple[list[Tiling], list[Tiling]]]:
    """By tokens of a tile, what is tried for gate and up, and for down."""
    found: dict[int, tuple[list[Tiling], list[Tiling]]] = {}
    wide = format in ("bf16", "fp8", "fp8_block", "int8", "q8_0")
    one = tokens_a_slot <= 0.13
    if tokens_a_slot <= 5:
        if wide:
            small = [Tiling(8, 64, 128, 4, 3), Tiling(8, 32, 128, 2, 4), Tiling(8, 16, 128, 1, 5)]
            small += [Tiling(8, 64, 64, 4, 5), Tiling(8, 16, 256, 2, 3, depth=2)] if one else []
        else:
            small = [
                Tiling(8, 64, 256, 4, 3),
                Tiling(8, 64, 256, 4, 3, registers=96),
                Tiling(8, 32, 256, 2, 3),
                Tiling(8, 64, 128, 4, 4),
                Tiling(8, 32, 128, 2, 5),
            ]
            small += [Tiling(8, 16, 256, 2, 4, depth=2)] if one else []
        found[8] = (
            small,
            small + ([replace(tile, prefetch=True) for tile in small[:3]] if tokens_a_slot < 1 else []),
        )
    if 2 < tokens_a_slot <= 16:
        columns = 128 if wide else 256
        small = [
            Tiling(16, 32, columns, 2, 4),
            Tiling(16, 64, columns, 4, 3),
            Tiling(16, 64, 128, 4, 4),
            Tiling(16, 128, 128, 4, 3),
            Tiling(16, 128, 128, 8, 3),
        ]
        if not wide:
            small += [Tiling(16, 64, columns, 4, 3, parts=2), Tiling(16, 32, columns, 2, 3, parts=2)]
            small += [Tiling(16, 128, columns, 8, 3), Tiling(16, 128, columns, 4, 2)]
        found[16] = small, small
    if 6 <= tokens_a_slot <= 40:
        small = [Tiling(32, 64, 128, 4, 3), Tiling(32, 64, 64, 4, 4), Tiling(32, 128, 64, 4, 4)]
        found[32] = small, small
    if 12 <= tokens_a_slot <= 64:
        small = [Tiling(64, 64, 64, 4, 4), Tiling(64, 128, 64, 4, 4)]
        found[64] = small, small
    if tokens_a_slot >= 64:
        if format == "bf16":
            gates = [Tiling(128, 128, 64, 8, 4), Tiling(128, 128, 64, 8, 3)]
        else:
            gates = [
                Tiling(128, 64, 128, 4, 2),
                Tiling(128, 64, 64, 4, 3),
                Tiling(128, 64, 64, 4, 4),
                Tiling(128, 128, 64, 8, 3),
                Tiling(128, 128, 64, 8, 3, swap=False),
                Tiling(128, 64, 64, 8, 3, swap=False),
                Tiling(128, 64, 64, 4, 3, swap=False),
            ]
        downs = [Tiling(128, 128, 64, 8, 3), Tiling(128, 128, 64, 4, 3)]
        downs += [replace(tile, swap=False) for tile in downs]
        found[128] = gates, downs
        found[64] = (
            [Tiling(64, 64, 64, 4, 4), Tiling(64, 128, 64, 8, 3), Tiling(64, 128, 64, 4, 3)],
            [Tiling(64, 128, 64, 4, 4), Tiling(64, 128, 64, 8, 3)],
        )
    return found


@dataclass(frozen=True)
class Found:
    us: float
    error: float
    tiling: ExpertTiling


@dataclass
class Bench:
    """Measures tilings of one shape, format and token count."""

    shape_name: str
    format: str
    tokens: int
    weights: list[ExpertWeights]
    repeats: int
    measured: list[Measurement] = field(default_factory=list)

    def measure(self, tiling: ExpertTiling) -> Found | None:
        shape = SHAPES[self.shape_name]
        used = self.weights if self.tokens <= 512 else self.weights[:3]
        try:
            wrong = error(self.weights[0], shape, min(self.tokens, 256), tiling)
            us = microseconds(used, shape, self.tokens, tiling, self.repeats)
        except Exception as problem:
            print(self.shape_name, self.format, self.tokens, short(tiling), str(problem)[-120:], flush=True)
            return None
        if not wrong < WRONG:
            print(self.shape_name, self.format, self.tokens, short(tiling), f"error {wrong:.1e}", flush=True)
            return None
        self.measured.append(Measurement(shape_of(self.weights[0], shape.top_k), self.tokens, us, tiling))
        return Found(us, wrong, tiling)

    def tune(self) -> Found | None:
        slots = SHAPES[self.shape_name].experts / SHAPES[self.shape_name].top_k
        best: list[Found] = []
        for gate_ups, downs in candidates(self.format, self.tokens / slots).values():
            trials = [self.measure(ExpertTiling(one, downs[0])) for one in gate_ups]
            good = [one for one in trials if one]
            if good:
                first = min(good, key=lambda one: one.us)
                trials = [self.measure(ExpertTiling(first.tiling.gate_up, one)) for one in downs[1:]]
                best.append(min([first, *(one for one in trials if one)], key=lambda one: one.us))
        return min(best, key=lambda one: one.us) if best else None


def compile_all(args: argparse.Namespace) -> None:
    """One of several processes, each of which compiles its share of what `tune` will use."""
    part, of = args.compile
    jobs = []
    for shape, name, tokens in itertools.product(args.shapes, args.formats, args.tokens):
        slots = SHAPES[shape].experts / SHAPES[shape].top_k
        if args.tune:
            for gate_ups, downs in candidates(name, tokens / slots).values():
                pairs = itertools.zip_longest(gate_ups, downs)
                jobs += [
                    (shape, name, tokens, ExpertTiling(a or gate_ups[0], b or downs[0])) for a, b in pairs
                ]
        else:
            jobs.append((shape, name, tokens, None))
    for shape, name, tokens, tiling in jobs[part::of]:
        small = replace(SHAPES[shape], experts=max(16, SHAPES[shape].top_k))
        weights = make(FORMATS[name], small, 1)[0]
        x, route = inputs(small, tokens)
        with contextlib.suppress(Exception):
            if tiling is None:
                real = replace(shape_of(weights, small.top_k), experts=SHAPES[shape].experts)
                tiling = expert_tiling(tokens, real)
            tiled_experts(x, route, weights, SILU, tiling)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["qwen3"])
    parser.add_argument("--formats", nargs="+", default=["bf16", "nvfp4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 8192])
    parser.add_argument("--tune", type=Path)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--compile", nargs=2, type=int)
    args = parser.parse_args()
    if args.compile:
        return compile_all(args)
    began = time.monotonic()
    compile_side_by_side("tests.bench.gpu_experts")
    measured = read_table(args.tune) if args.tune and args.tune.exists() else []
    for shape_name, name in itertools.product(args.shapes, args.formats):
        shape = SHAPES[shape_name]
        weights = make(FORMATS[name], shape, sets_for(FORMATS[name], shape))
        for tokens in args.tokens:
            if time.monotonic() - began > args.seconds:
                break
            bench = Bench(shape_name, name, tokens, weights, args.repeats)
            chosen = expert_tiling(tokens, shape_of(weights[0], shape.top_k))
            found = bench.tune() if args.tune else bench.measure(chosen)
            measured += bench.measured
            if args.tune:
                write_table(args.tune, measured)
            if found:
                least, size = floor(weights[0], shape, tokens)
                percent, rate = 100 * least / found.us, size / found.us / 1e3
                print(
                    f"{shape_name:7} {name:11} {tokens:5} {found.us:7.1f} us {rate:5.0f} GB/s "
                    f"{percent:3.0f}% err {found.error:.1e} {short(found.tiling)}",
                    flush=True,
                )
        del weights
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s")
    return None


def short(tiling: ExpertTiling) -> str:
    return " | ".join(_short(tile) for tile in (tiling.gate_up, tiling.down))


def _short(tile: Tiling) -> str:
    extras = {"k": tile.splits, "d": tile.depth, "p": tile.parts}
    words = [f"{tile.tokens}x{tile.rows}x{tile.columns} w{tile.warps} s{tile.stages}"]
    words += [f"{name}{value}" for name, value in extras.items() if value > 1]
    words += [f"r{tile.registers}"] if tile.registers else []
    return " ".join(words + ["plain"] * (not tile.swap) + ["prefetch"] * tile.prefetch)


if __name__ == "__main__":
    main()
