"""Dense products alone on the GPU: microseconds of each, and the table of their tilings.

    python -m tests.bench.gpu_linear [--cases nvfp4_words:5120x2048 ...] [--tokens 1 8 ...]
        [--tune kernels/moebius_kernels/triton/tables/hopper_dense.json]

What is measured is what `moebius kernels tune` measures (`triton/tune_trials.py`): a norm before each
product, as in a model; what is told is both, and the norm alone. `--tune` looks for the best tilings, and
writes them into the table that is shipped. Floors: bytes of the matrix at 4.3 TB/s, or operations at 790
TFLOP/s, whichever is longer.
"""

import argparse
import time
from pathlib import Path

import torch

from moebius_kernels.triton.dense_tiling import (
    DenseMeasurement,
    DenseShape,
    dense_tiling,
    read_table,
    write_table,
)
from moebius_kernels.triton.linear import multiply_expanded
from moebius_kernels.triton.tiling import Tiling
from moebius_kernels.triton.tiling_tables import replaced
from moebius_kernels.triton.tune import compile_ahead, measured
from moebius_kernels.triton.tune_points import points_of, shape_of
from moebius_kernels.triton.tune_search import short
from moebius_kernels.triton.tune_trials import DenseTrials, sets_of
from moebius_kernels.tuning import DenseProduct
from tests.bench.gpu_experts import BANDWIDTH, DEVICE, FLOPS, say
from tests.kernels.triton.matrices import FORMATS

QWEN, GPT_OSS = ("5120x2048", "2048x4096"), ("5120x2880", "2880x4096")
CASES = (
    *(f"nvfp4_words:{shape}" for shape in QWEN),
    *(f"bf16:{shape}" for shape in (*QWEN, "128x2048", "151936x2048", *GPT_OSS, "32x2880", "201088x2880")),
    *(f"{form}:{shape}" for form in ("fp8_block", "q4_k", "q4_0") for shape in QWEN),
)
# With more, or with more numbers of y, nothing is tiled, or nothing is measured.
_MOST_TILED, _MOST_OUTPUTS = 256, 1 << 27


def product_of(case: str) -> DenseProduct:
    name, _, size = case.partition(":")
    rows, columns = map(int, size.split("x"))
    return DenseProduct(FORMATS[name], rows, columns)


def trials_of(product: DenseProduct, sets: int | None = None) -> DenseTrials:
    """`sets`: of weights; None: more than the L2 holds."""
    return DenseTrials(product, sets or sets_of(product, DEVICE), DEVICE)


def chosen(product: DenseProduct, tokens: int) -> Tiling:
    shape = shape_of(product)
    assert isinstance(shape, DenseShape), shape
    return dense_tiling(tokens, shape)


def measure(cases: list[str], tokens: list[int]) -> None:
    products = [product_of(case) for case in cases]
    points = [one for one in points_of(products, tokens) if one.tokens <= _MOST_TILED]
    compile_ahead([(one, chosen(one.product, one.tokens)) for one in points], say)  # type: ignore[arg-type]
    for case, product in zip(cases, products, strict=True):
        trials = trials_of(product)
        for count in tokens:
            if count * product.rows > _MOST_OUTPUTS:
                continue
            line = f"{case:24} {count:5} norm {trials.microseconds(count, None):6.1f}"
            if count <= _MOST_TILED:
                tiling = chosen(product, count)
                us, wrong = trials.microseconds(count, tiling), trials.error(count, tiling)
                line += f" tiled {us:6.1f} err {wrong:.1e} {short(tiling)}"
            if count >= 32 and product.rows <= 8192:
                us = trials.microseconds(count, multiply_expanded)
                line += f" library {us:6.1f} err {trials.error(count, multiply_expanded):.1e}"
            operations = 2 * count * product.rows * product.columns
            least = 1e6 * max(trials.blocks[0].nbytes / BANDWIDTH, operations / FLOPS)
            print(f"{line} floor {least:5.1f}", flush=True)
        del trials
        torch.cuda.empty_cache()


def tune(cases: list[str], tokens: list[int], table: Path) -> None:
    found = read_table(table) if table.exists() else []
    for entry in measured(points_of([product_of(case) for case in cases], tokens), say):
        assert isinstance(entry, DenseMeasurement)
        found = replaced(found, entry)
        write_table(table, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256, 1024, 8192])
    parser.add_argument("--tune", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    if args.tune:
        tune(args.cases, args.tokens, args.tune)
    else:
        measure(args.cases, args.tokens)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
