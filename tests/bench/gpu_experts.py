"""Routed experts alone on the GPU: correctness at true dimensions, microseconds, and the tilings' table.

    python -m tests.bench.gpu_experts [--shapes qwen3 ...] [--formats nvfp4 ...] [--tokens 1 8 ...] [--tune FILE]

Each figure is the median of replays of a CUDA graph that runs once through several sets of weights, more than
the L2 holds, and has everything in it between the router's output and the layer's: alignment, gate and up,
activation, down, weighted sum. Routing is uniform. Floors: bytes of the experts that were hit at 4.3 TB/s, or
operations at 790 TFLOP/s, whichever is longer.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moebius_kernels.activations import SILU
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.dense import dense
from moebius_kernels.router import Route, topk_softmax
from moebius_kernels.triton.experts import expert_tiling, tiled_experts
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from tests.kernels.triton.matrices import FORMATS, random_matrix

BANDWIDTH, FLOPS = 4.3e12, 790e12
L2 = 120e6
DEVICE = torch.device("cuda")


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


def microseconds(weights: list[ExpertWeights], shape: Shape, tokens: int, tiling: ExpertTiling, repeats: int) -> float:
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
    one = random_size(format, shape)
    return max(6 if one < 3e8 else 3, -(-int(L2) // int(one / shape.experts * shape.top_k)) if one < 4e8 else 3)


def random_size(format, shape: Shape) -> float:
    from moebius_kernels.formats.format import StoredMatrix

    meta = StoredMatrix.empty(format, (shape.hidden, shape.inner), torch.device("meta"))
    return 3 * meta.nbytes * shape.experts


def candidates(format: str, tokens_a_slot: float) -> list[ExpertTiling]:
    """Gate_up and down are varied together: the largest gains come with the first few."""
    wide = format == "bf16"
    found = []
    if tokens_a_slot <= 16:
        for rows, columns, warps, stages in (
            (64, 128, 4, 4), (32, 128, 4, 4), (32, 256, 4, 3), (64, 256, 4, 3), (32, 256, 2, 4), (32, 128, 2, 4),
            (64, 64, 4, 5),
        ):  # fmt: skip
            if wide and columns == 256:
                continue
            found.append(ExpertTiling(Tiling(8, rows, columns, warps, stages), Tiling(8, rows, columns, warps, stages)))
    if tokens_a_slot >= 2:
        for tokens, rows, columns, warps, stages in ((16, 64, 128, 4, 3), (32, 64, 128, 4, 3), (16, 32, 128, 2, 4)):
            found.append(ExpertTiling(Tiling(tokens, rows, columns, warps, stages), Tiling(tokens, rows, columns, warps, stages)))
    if tokens_a_slot >= 16:
        for tokens, rows, down_rows, columns, warps, stages, swap in (
            (64, 64, 128, 64, 4, 4, True), (128, 64, 128, 64, 8, 3, True), (128, 64, 128, 64, 8, 3, False),
            (128, 128, 256, 64, 8, 3, True), (128, 128, 256, 64, 8, 3, False), (256, 64, 128, 64, 8, 3, True), (64, 64, 128, 64, 4, 4, False),
            (128, 64, 128, 64, 4, 3, True), (128, 64, 128, 64, 4, 3, False),
        ):  # fmt: skip
            found.append(
                ExpertTiling(
                    Tiling(tokens, rows, columns, warps, stages, swap=swap),
                    Tiling(tokens, down_rows, columns, warps, stages, swap=swap),
                )
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", default=["qwen3"])
    parser.add_argument("--formats", nargs="+", default=["bf16", "nvfp4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 8192])
    parser.add_argument("--tune", type=Path)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    began = time.monotonic()
    lines = []
    for shape_name in args.shapes:
        shape = SHAPES[shape_name]
        for name in args.formats:
            weights = make(FORMATS[name], shape, sets_for(FORMATS[name], shape))
            for tokens in args.tokens:
                if time.monotonic() - began > args.seconds:
                    break
                x, route = inputs(shape, tokens)
                least, size = floor(weights[0], shape, tokens)
                used = weights if tokens <= 512 else weights[:3]
                tilings = [expert_tiling(x, route, weights[0])]
                if args.tune:
                    tilings = candidates(name, tokens * shape.top_k / shape.experts)
                found = []
                for tiling in tilings:
                    try:
                        wrong = error(weights[0], shape, min(tokens, 256), tiling)
                        us = microseconds(used, shape, tokens, tiling, args.repeats)
                    except Exception as problem:
                        print(shape_name, name, tokens, tiling, type(problem).__name__, str(problem)[-160:], flush=True)
                        continue
                    found.append((us, wrong, tiling))
                    if args.tune:
                        record = {"shape": shape_name, "format": name, "tokens": tokens, "us": us, "error": wrong, **asdict(tiling)}
                        with args.tune.open("a") as file:
                            file.write(json.dumps(record) + "\n")
                if not found:
                    continue
                us, wrong, tiling = min(found, key=lambda one: one[0])
                lines.append(
                    f"{shape_name:8} {name:9} {tokens:6} {us:8.1f} us {size / us / 1e3:6.0f} GB/s {100 * least / us:4.0f}% "
                    f"err {max(one[1] for one in found):.1e} {short(tiling)}"
                )
                print(lines[-1], flush=True)
            del weights
            torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s")
    sys.stdout.flush()


def short(tiling: ExpertTiling) -> str:
    return " | ".join(
        f"{t.tokens}x{t.rows}x{t.columns} w{t.warps} s{t.stages} k{t.splits}{'' if t.swap else ' plain'}"
        for t in (tiling.gate_up, tiling.down)
    )


if __name__ == "__main__":
    main()
