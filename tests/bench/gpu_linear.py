"""Dense products alone on the GPU: microseconds of each, and the table of their tilings.

    python -m tests.bench.gpu_linear [--cases nvfp4_words:5120x2048 ...] [--tokens 1 8 ...]
        [--tune kernels/moebius_kernels/triton/tables/hopper_dense.json]

Each figure is the median of replays of a CUDA graph that goes through several matrices, more than the L2
holds, with a norm before each product, as in a model: what is told is both, and the norm alone. Floors: bytes
of the matrix at 4.3 TB/s, or operations at 790 TFLOP/s, whichever is longer.
"""

import argparse
import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.triton.dense_tiling import (
    DenseMeasurement,
    DenseShape,
    dense_tiling,
    read_table,
    write_table,
)
from moebius_kernels.triton.gemm import layout_for
from moebius_kernels.triton.linear import multiply_expanded, tiled_linear
from moebius_kernels.triton.rms_norm import rms_norm
from moebius_kernels.triton.tiling import Tiling
from tests.bench.compiling import compile_side_by_side
from tests.bench.gpu_experts import BANDWIDTH, DEVICE, FLOPS, WRONG, replay
from tests.kernels.triton.matrices import FORMATS, random_matrix

QWEN, GPT_OSS = ("5120x2048", "2048x4096"), ("5120x2880", "2880x4096")
CASES = (
    *(f"nvfp4_words:{shape}" for shape in QWEN),
    *(f"bf16:{shape}" for shape in (*QWEN, "128x2048", "151936x2048", *GPT_OSS, "32x2880", "201088x2880")),
    *(f"{form}:{shape}" for form in ("fp8_block", "q4_k", "q4_0") for shape in QWEN),
)


def make(case: str, count: int) -> list[StoredMatrix]:
    name, _, size = case.partition(":")
    rows, columns = map(int, size.split("x"))
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [random_matrix(FORMATS[name], (rows, columns), generator) for _ in range(count)]


def count_of(case: str) -> int:
    """Matrices, of 150 MB in all."""
    [meta] = make(case, 1)
    return max(3, min(64, int(150e6 / meta.nbytes)))


def candidates(shape: DenseShape, tokens: int) -> list[Tiling]:
    wide = shape.code in ("bf16", "e4m3", "int8")
    if tokens <= 32:
        tile = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
        step = 128 if wide else 256
        few = [
            Tiling(tile, 64, step, 4, 3),
            Tiling(tile, 32, step, 2, 4),
            Tiling(tile, 16, step, 1, 4),
            Tiling(tile, 16, 2 * step, 2, 4, depth=2),
            Tiling(tile, 16, 4 * step, 4, 3, depth=4),
            Tiling(tile, 32, 2 * step, 4, 3, depth=2),
            Tiling(tile, 64, 64, 4, 5),
        ]
    else:
        few = [
            Tiling(64, 64, 64, 4, 4),
            Tiling(64, 32, 128, 4, 3),
            Tiling(64, 16, 128, 4, 4),
            Tiling(64, 32, 64, 4, 5),
            Tiling(32, 32, 128, 2, 3),
            Tiling(32, 64, 64, 4, 4),
            Tiling(64, 128, 64, 4, 4),
            Tiling(64, 128, 64, 8, 4),
        ]
        if tokens > 64:
            few += [Tiling(128, 64, 64, 4, 4), Tiling(128, 32, 64, 4, 5), Tiling(128, 64, 64, 8, 4)]
    found = []
    for one in few:
        blocks = -(-shape.rows // one.rows) * -(-tokens // one.tokens)
        # Fewer than fill the chip, down to two steps each.
        for splits in (1, 2, 4, 8):
            if splits == 1 or (blocks * splits <= 800 and shape.columns >= 2 * splits * one.columns):
                found.append(replace(one, splits=splits))
    return found


def with_prefetch(tiling: Tiling) -> Tiling:
    return replace(tiling, prefetch=True)


def error(block: StoredMatrix, tokens: int, multiply: Callable[..., None]) -> float:
    x = torch.randn(tokens, block.shape[1], device=DEVICE).bfloat16()
    y = torch.full((tokens, block.shape[0]), float("nan"), device=DEVICE).bfloat16()
    multiply(x, block, None, y)
    some = slice(0, min(block.shape[0], 4096))
    expected = x.float() @ block.dequantize()[some].T
    return float((y[:, some].float() - expected).norm() / expected.norm())


def microseconds(
    blocks: list[StoredMatrix], tokens: int, multiply: Callable[..., None] | None, repeats: int
) -> float:
    columns = blocks[0].shape[1]
    x = torch.randn(tokens, columns, device=DEVICE).bfloat16()
    y = torch.empty(tokens, blocks[0].shape[0], device=DEVICE).bfloat16()
    weight = torch.ones(columns, device=DEVICE).bfloat16()

    def run() -> None:
        for block in blocks:
            normed = rms_norm(x, weight, 1e-6)
            if multiply is not None:
                multiply(normed, block, None, y)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return replay(graph, repeats) / len(blocks)


def tiled(tiling: Tiling) -> Callable[..., None]:
    return lambda x, block, bias, y: tiled_linear(x, block, bias, y, tiling)


def compile_all(args: argparse.Namespace) -> None:
    """One of several processes, each of which compiles its share."""
    part, of = args.compile
    jobs = list(itertools.product(args.cases, args.tokens))
    todo = []
    for case, tokens in jobs:
        if tokens > args.most_tiled:
            continue
        shape = shape_of(make(case, 1)[0])
        todo += [(case, tokens, one) for one in (candidates(shape, tokens) if args.tune else ())]
    # With and without prefetch are the same but for one argument.
    for case, tokens, tiling in sorted(todo, key=lambda job: job[0])[part::of]:
        [block] = make(case, 1)
        x = torch.randn(tokens, block.shape[1], device=DEVICE).bfloat16()
        y = torch.empty(tokens, block.shape[0], device=DEVICE).bfloat16()
        with contextlib.suppress(Exception):
            tiled_linear(x, block, None, y, tiling)


def shape_of(block: StoredMatrix) -> DenseShape:
    return DenseShape(layout_for(block).code, *block.shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 1024, 8192])
    parser.add_argument("--most-tiled", type=int, default=256)
    parser.add_argument("--tune", type=Path)
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", nargs=2, type=int)
    args = parser.parse_args()
    if args.compile:
        return compile_all(args)
    began = time.monotonic()
    compile_side_by_side("tests.bench.gpu_linear")
    measured = read_table(args.tune) if args.tune and args.tune.exists() else []
    for case in args.cases:
        blocks = make(case, count_of(case))
        shape = shape_of(blocks[0])
        for tokens in args.tokens:
            if time.monotonic() - began > args.seconds or tokens * shape.rows > 1 << 27:
                break
            bare = microseconds(blocks, tokens, None, args.repeats)
            line = f"{case:24} {tokens:5} norm {bare:6.1f}"
            if tokens <= args.most_tiled:
                usual = dense_tiling(tokens, shape)
                trials = {usual: microseconds(blocks, tokens, tiled(usual), args.repeats)}
                for tiling in candidates(shape, tokens) if args.tune else ():
                    with contextlib.suppress(Exception):
                        trials[tiling] = microseconds(blocks, tokens, tiled(tiling), args.repeats)
                best = min(trials, key=lambda one: trials[one])
                eager = with_prefetch(best)
                trials[eager] = microseconds(blocks, tokens, tiled(eager), args.repeats)
                best = min(trials, key=lambda one: trials[one])
                while not (wrong := error(blocks[0], tokens, tiled(best))) < WRONG:
                    print(f"{case} {tokens} error {wrong:.1e} {short(best)}", flush=True)
                    del trials[best]
                    best = min(trials, key=lambda one: trials[one])
                measured.append(DenseMeasurement(shape, tokens, trials[best], best))
                line += f" usual {trials[usual]:6.1f} best {trials[best]:6.1f} err {wrong:.1e} {short(best)}"
            if tokens >= 32 and shape.rows <= 8192:
                us = microseconds(blocks, tokens, multiply_expanded, args.repeats)
                line += f" library {us:6.1f} err {error(blocks[0], tokens, multiply_expanded):.1e}"
            operations = 2 * tokens * shape.rows * shape.columns
            least = 1e6 * max(blocks[0].nbytes / BANDWIDTH, operations / FLOPS)
            print(f"{line} floor {least:5.1f}", flush=True)
        if args.tune:
            write_table(args.tune, measured)
        del blocks
        torch.cuda.empty_cache()
    print(f"{time.monotonic() - began:.0f} s")
    return None


def short(tile: Tiling) -> str:
    words = [f"{tile.tokens}x{tile.rows}x{tile.columns} w{tile.warps} s{tile.stages}"]
    words += [f"{name}{value}" for name, value in (("k", tile.splits), ("d", tile.depth)) if value > 1]
    return " ".join(words + ["prefetch"] * tile.prefetch)


if __name__ == "__main__":
    main()
