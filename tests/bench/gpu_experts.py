"""Routed experts alone on the GPU: correctness at true dimensions, microseconds, and the tilings' table.

    python -m tests.bench.gpu_experts [--shapes qwen3 ...] [--formats nvfp4_words ...] [--tokens 1 8 ...]
        [--tune kernels/moebius_kernels/triton/tables/hopper.json]

What is measured is what `moebius kernels tune` measures (`triton/tune_trials.py`); `--tune` looks for the
best tilings, and writes them into the table that is shipped. Floors: bytes of the experts that were hit at
4.3 TB/s, or operations at 790 TFLOP/s, whichever is longer.
"""

import argparse
import itertools
import time
from pathlib import Path

import torch

from moebius_kernels.triton.expert_tiling import (
    ExpertShape,
    Measurement,
    expert_tiling,
    read_table,
    write_table,
)
from moebius_kernels.triton.tiling import ExpertTiling
from moebius_kernels.triton.tiling_tables import replaced
from moebius_kernels.triton.tune import compile_ahead, measured
from moebius_kernels.triton.tune_points import points_of, shape_of
from moebius_kernels.triton.tune_search import short
from moebius_kernels.triton.tune_trials import ExpertTrials, sets_of
from moebius_kernels.tuning import Compiling, Dropped, ExpertProduct, Trying, Tuned
from tests.kernels.triton.matrices import FORMATS

BANDWIDTH, FLOPS = 4.3e12, 790e12
DEVICE = torch.device("cuda")
# Experts, experts a token, hidden and inner width.
SHAPES = {
    "qwen3": (128, 8, 2048, 768),
    "qwen3.6": (256, 8, 2048, 512),
    "flash": (512, 10, 2560, 640),
    "gemma": (128, 8, 2816, 704),
    "gpt-oss": (32, 4, 2880, 2880),
}


def product_of(shape: str, form: str) -> ExpertProduct:
    return ExpertProduct(FORMATS[form], FORMATS[form], *SHAPES[shape])


def trials_of(product: ExpertProduct, sets: int | None = None) -> ExpertTrials:
    """`sets`: of weights; None: more than the L2 holds."""
    return ExpertTrials(product, sets or sets_of(product, DEVICE), DEVICE)


def chosen(product: ExpertProduct, tokens: int) -> ExpertTiling:
    shape = shape_of(product)
    assert isinstance(shape, ExpertShape), shape
    return expert_tiling(tokens, shape)


def floor(trials: ExpertTrials, tokens: int) -> tuple[float, float]:
    """Microseconds, and bytes of the experts hit."""
    product, [gate_up], down = trials.product, trials.weights[0].gate_up, trials.weights[0].down
    hit = trials.inputs(tokens)[1].experts.unique().numel()
    size = hit * (gate_up.nbytes + down.nbytes) / product.experts
    operations = 6 * tokens * product.top_k * product.hidden * product.inner
    return 1e6 * max(size / BANDWIDTH, operations / FLOPS), size


def say(event: Compiling | Trying | Dropped | Tuned) -> None:
    """What a search tells, but for each single trial."""
    match event:
        case Dropped(point, tiling, reason):
            print(f"{point.title} {point.tokens} dropped {tiling}: {reason}", flush=True)
        case Tuned(point, tiling, microseconds, usual):
            print(f"{point.title} {point.tokens} {microseconds} us, was {usual} us, {tiling}", flush=True)


def measure(products: list[tuple[str, ExpertProduct]], tokens: list[int]) -> None:
    points = points_of([product for _, product in products], tokens)
    compile_ahead([(one, chosen(one.product, one.tokens)) for one in points], say)  # type: ignore[arg-type]
    for name, product in products:
        trials = trials_of(product)
        for count in tokens:
            tiling = chosen(product, count)
            wrong, us = trials.error(count, tiling), trials.microseconds(count, tiling)
            least, size = floor(trials, count)
            print(
                f"{name:19} {count:5} {us:7.1f} us {size / us / 1e3:5.0f} GB/s {100 * least / us:3.0f}% "
                f"err {wrong:.1e} {short(tiling)}",
                flush=True,
            )
        del trials
        torch.cuda.empty_cache()


def tune(products: list[tuple[str, ExpertProduct]], tokens: list[int], table: Path) -> None:
    found = read_table(table) if table.exists() else []
    for entry in measured(points_of([product for _, product in products], tokens), say):
        assert isinstance(entry, Measurement)
        found = replaced(found, entry)
        write_table(table, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["qwen3"], choices=SHAPES)
    parser.add_argument("--formats", nargs="+", default=["bf16", "nvfp4_words"], choices=FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 8192])
    parser.add_argument("--tune", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    products = [
        (f"{shape} {form}", product_of(shape, form))
        for shape, form in itertools.product(args.shapes, args.formats)
    ]
    if args.tune:
        tune(products, args.tokens, args.tune)
    else:
        measure(products, args.tokens)
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
