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
from moebius_kernels.triton.tune import measured
from moebius_kernels.triton.tune_points import points_of, shape_of
from moebius_kernels.triton.tune_search import short
from moebius_kernels.triton.tune_trials import DenseTrials, Multiply, sets_of
from moebius_kernels.tuning import DenseProduct
from tests.bench.gpu_experts import BANDWIDTH, DEVICE, FLOPS, compile_here, say
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


def ways(product: DenseProduct, tokens: int) -> dict[str, Tiling | Multiply]:
    """By the words that a line has for it."""
    found: dict[str, Tiling | Multiply] = {}
    if tokens <= _MOST_TILED:
        found["tiled"] = chosen(product, tokens)
    if tokens >= 32 and product.rows <= 8192:
        found["library"] = multiply_expanded
    return found


def measure(cases: list[str], tokens: list[int]) -> None:
    products = [product_of(case) for case in cases]
    compile_here(
        [(one, count, way) for one in products for count in tokens for way in ways(one, count).values()]
    )
    for case, product in zip(cases, products, strict=True):
        trials = trials_of(product)
        for count in tokens:
            if count * product.rows > _MOST_OUTPUTS:
                continue
            line = f"{case:24} {count:5} norm {trials.microseconds(count, None):6.1f}"
            for name, way in ways(product, count).items():
                us, wrong = trials.microseconds(count, way), trials.error(count, way)
                line += f" {name} {us:6.1f} err {wrong:.1e}"
                line += f" {short(way)}" if isinstance(way, Tiling) else ""
            operations = 2 * count * product.rows * product.columns
            least = 1e6 * max(trials.blocks[0].nbytes / BANDWIDTH, operations / FLOPS)
            print(f"{line} floor {least:5.1f}", flush=True)
        del trials
        torch.cuda.empty_cache()


def tune(cases: list[str], tokens: list[int], table: Path) -> None:
    found = read_table(table) if table.exists() else []
    points = points_of([product_of(case) for case in cases], tokens)
    for entry in measured(points, torch.cuda.get_device_capability(DEVICE), say):
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
