"""FP8 products of FP8 activations on the GPU: experts and dense layers, beside ways that round none.

    python -m tests.bench.gpu_fp8 [--tokens 128 512 ...] [--parts experts dense] [--table FILE]

Errors are relative: to the reference that rounds activations too (`rounded_products.py`), and to the one that
does not. Experts are Qwen3-30B-A3B's. `--table`: where the fastest tilings go.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from moebius_kernels import rounded_products
from moebius_kernels.activations import SILU
from moebius_kernels.experts import routed_experts
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.linear import linear
from moebius_kernels.triton import fp8_experts, fp8_linear
from moebius_kernels.triton.expert_tiling import Measurement, read_table, write_table
from moebius_kernels.triton.linear import multiply_expanded
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from moebius_kernels.triton.tiling_tables import replaced
from moebius_kernels.triton.tune_trials import ExpertTrials, poisoned, relative_error, replayed
from moebius_kernels.tuning import DenseProduct, ExpertProduct
from tests.bench.gpu_experts import SHAPES, chosen, compile_here, trials_of
from tests.bench.gpu_linear import trials_of as dense_trials_of

FORM = Fp8(128, 128, rounds_activations=True)
PRODUCT = ExpertProduct(FORM, FORM, *SHAPES["qwen3"])
# As the rules have them.
EXPERTS = {
    "tiles of 128": ExpertTiling(Tiling(128, 128, 128, 8, 4), Tiling(128, 256, 128, 8, 4)),
    "tiles of 64": ExpertTiling(Tiling(64, 128, 128, 4, 2), Tiling(64, 256, 128, 4, 2)),
}
DENSE_SHAPES = ((5120, 2048), (2048, 4096))
# One odd: of other numbers compilers make other kernels.
_CHECKED = (97, 1024)
_SETS = 3
Way = Callable[[torch.Tensor, StoredMatrix], torch.Tensor]


def errors(trials: ExpertTrials, tokens: int, tiling: ExpertTiling) -> str:
    x, route = trials.inputs(tokens)
    with poisoned():
        y = fp8_experts.tiled_experts(x, route, trials.weights[0], SILU, tiling)
    references = rounded_products.routed_experts, routed_experts
    return told_errors(y, [one(x.float(), route, trials.weights[0], SILU) for one in references])


def told_errors(y: torch.Tensor, expected: Sequence[torch.Tensor]) -> str:
    return "errors " + " / ".join(f"{relative_error(y, one):.1e}" for one in expected)


def experts_time(trials: ExpertTrials, tokens: int, tiling: ExpertTiling) -> float:
    weights = trials.weights[:_SETS]
    given = [trials.inputs(tokens, seed) for seed in range(len(weights))]

    def run() -> None:
        for (x, route), layer in zip(given, weights, strict=True):
            fp8_experts.tiled_experts(x, route, layer, SILU, tiling)

    return replayed(run) / len(weights)


def told_time(microseconds: float, operations: int) -> str:
    return f"{microseconds:7.1f} us {operations / microseconds / 1e6:5.0f} TFLOP/s"


def guarded(name: str, tell: Callable[..., str], *args: object) -> None:
    """One that fails does not cost the others."""
    try:
        print(f"{name:32} {tell(*args)}", flush=True)
    except Exception as error:
        print(f"{name:32} {error!r}"[:300], flush=True)


def measure_experts(tokens: Sequence[int], table: Path | None) -> None:
    trials = trials_of(PRODUCT, _SETS)
    for name, tiling in EXPERTS.items():
        for count in _CHECKED:
            guarded(f"experts {count} {name}", errors, trials, count, tiling)
    for count in tokens:
        operations = 6 * count * PRODUCT.top_k * PRODUCT.hidden * PRODUCT.inner
        usual = chosen(PRODUCT, count)
        guarded(f"experts {count} W8A16", _told_usual, trials, count, usual, operations)
        times: dict[ExpertTiling, float] = {}
        for name, tiling in EXPERTS.items():
            guarded(f"experts {count} {name}", _told_experts, trials, count, tiling, operations, times)
        if table is not None and times:
            best = min(times, key=lambda one: times[one])
            shape = fp8_experts.shape_of(trials.weights[0], PRODUCT.top_k)
            entry = Measurement(shape, count, times[best], best)
            write_table(table, replaced(read_table(table) if table.exists() else [], entry))


def _told_usual(trials: ExpertTrials, tokens: int, tiling: ExpertTiling, operations: int) -> str:
    return told_time(trials.microseconds(tokens, tiling), operations)


def _told_experts(
    trials: ExpertTrials, tokens: int, tiling: ExpertTiling, operations: int, times: dict[ExpertTiling, float]
) -> str:
    times[tiling] = experts_time(trials, tokens, tiling)
    return told_time(times[tiling], operations)


def measure_dense(tokens: Sequence[int]) -> None:
    for rows, columns in DENSE_SHAPES:
        trials = dense_trials_of(DenseProduct(FORM, rows, columns), _SETS)
        for count in tokens:
            x, y = trials.inputs(count)
            ways: dict[str, Way] = {"W8A16": lambda x, block, y=y: multiply_expanded(x, block, None, y) or y}  # type: ignore[misc]
            ways |= {"cuBLAS": lambda x, block: fp8_linear.linear(x, [block])}
            expected = [one(x.float(), trials.blocks[:1]) for one in (rounded_products.linear, linear)]
            for name, way in ways.items():
                guarded(f"{rows}x{columns} {count} {name}", _told_dense, x, trials.blocks, way, expected)


def _told_dense(
    x: torch.Tensor, blocks: Sequence[StoredMatrix], way: Way, expected: Sequence[torch.Tensor]
) -> str:
    with poisoned():
        y = way(x, blocks[0])

    def run() -> None:
        for block in blocks:
            way(x, block)

    operations = 2 * len(x) * blocks[0].shape[0] * blocks[0].shape[1]
    return f"{told_time(replayed(run) / len(blocks), operations)}, {told_errors(y, expected)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 512, 2048, 8192, 16384])
    parser.add_argument("--parts", nargs="+", default=["experts", "dense"])
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    rounded = [partial(fp8_experts.tiled_experts, tiling=tiling) for tiling in EXPERTS.values()]
    if "experts" in args.parts:
        compile_here(
            [
                *((PRODUCT, count, chosen(PRODUCT, count)) for count in args.tokens),
                *((PRODUCT, count, way) for way in rounded for count in (*args.tokens, *_CHECKED)),
            ]
        )
    print(f"compiled {time.monotonic() - began:.0f} s", flush=True)
    if "experts" in args.parts:
        measure_experts(args.tokens, args.table)
    if "dense" in args.parts:
        measure_dense([count for count in args.tokens if count <= 8192])
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
