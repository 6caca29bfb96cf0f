"""Routed experts alone on the GPU: correctness at true dimensions, microseconds, and the tilings' table.

    python -m tests.bench.gpu_experts [--shapes qwen3 ...] [--formats nvfp4_words ...] [--tokens 1 8 ...]
        [--routing uniform zipf] [--out FILE] [--tune kernels/moebius_kernels/triton/tables/hopper.json]

A row for each of Triton's backends that a preflight would try: it takes the fastest. What is measured is
what `moebius kernels tune` measures (`triton/tune_trials.py`); `--tune` looks for the best tilings, and
writes them into the table that is shipped. Floors: bytes of the experts that were hit at 4.3 TB/s, or
operations at 790 TFLOP/s, whichever is longer. With Zipf's law an expert is as likely as its rank is low.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.calls import shapes_of
from moebius_kernels.registry import Query, TokenRange, refusal
from moebius_kernels.router import Route, topk_softmax
from moebius_kernels.triton import expanded_experts, hopper_experts
from moebius_kernels.triton.expert_tiling import (
    ExpertShape,
    Measurement,
    expert_tiling,
    read_table,
    write_table,
)
from moebius_kernels.triton.tiling import ExpertTiling
from moebius_kernels.triton.tiling_tables import replaced
from moebius_kernels.triton.tune import measured
from moebius_kernels.triton.tune_ahead import Trial, compile_ahead
from moebius_kernels.triton.tune_launches import sizes_of
from moebius_kernels.triton.tune_points import points_of, shape_of
from moebius_kernels.triton.tune_search import short
from moebius_kernels.triton.tune_trials import Experts, ExpertTrials, sets_of
from moebius_kernels.tuning import Compiling, Dropped, ExpertProduct, Trying, Tuned
from moebius_worker.preflight.machine import device_here
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


USUAL = ("bf16", "fp8_block", "nvfp4_words", "mxfp4_words", "int4_words", "q4_0", "q4_k")
TOKENS = (1, 2, 8, 32, 64, 128, 512, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Row:
    """`least`: the floor, in microseconds; `hit`: experts with tokens; `error`: relative; `way`: a backend,
    or the tiling of the one that has tilings."""

    shape: str
    format: str
    routing: str
    tokens: int
    microseconds: float
    least: float
    hit: int
    error: float
    way: str


class SkewedTrials(ExpertTrials):
    """Tokens go to the expert of rank r in proportion to 1 / r; which one that is differs from set to set."""

    def inputs(self, tokens: int, seed: int = 0) -> tuple[torch.Tensor, Route]:
        x, _ = super().inputs(tokens, seed)
        generator = torch.Generator(self.device).manual_seed(seed)
        experts = self.product.experts
        rank = 1 + torch.randperm(experts, generator=generator, device=self.device)
        # The largest of these are drawn one after the other, without replacement, by their likelihoods.
        noise = torch.empty(tokens, experts, device=self.device).exponential_(generator=generator)
        return x, topk_softmax(-(noise.log() + rank.log()), self.product.top_k)


ROUTING: dict[str, type[ExpertTrials]] = {"uniform": ExpertTrials, "zipf": SkewedTrials}


def product_of(shape: str, form: str) -> ExpertProduct:
    return ExpertProduct(FORMATS[form], FORMATS[form], *SHAPES[shape])


def trials_of(product: ExpertProduct, sets: int | None = None, routing: str = "uniform") -> ExpertTrials:
    """`sets`: of weights; None: more than the L2 holds."""
    return ROUTING[routing](product, sets or sets_of(product, DEVICE), DEVICE)


def chosen(product: ExpertProduct, tokens: int) -> ExpertTiling:
    shape = shape_of(product)
    assert isinstance(shape, ExpertShape), shape
    return expert_tiling(tokens, shape)


def query_of(product: ExpertProduct, tokens: int, activation: Activation = SILU) -> Query:
    """What a preflight asks backends before it tries them."""
    meta = torch.device("meta")
    call = {
        "x": torch.empty(1, product.hidden, dtype=torch.bfloat16, device=meta),
        "route": topk_softmax(torch.empty(1, product.experts, device=meta), product.top_k),
        "weights": sizes_of(product),
        "activation": activation,
    }
    shapes = shapes_of("routed_experts", call)
    return Query("routed_experts", shapes, TokenRange(tokens, tokens), device_here(DEVICE.type))


def ways(product: ExpertProduct, tokens: int) -> dict[str, ExpertTiling | Experts]:
    """By the words that a row has for it."""
    tiling, query = chosen(product, tokens), query_of(product, tokens)
    others = (*hopper_experts.BACKENDS, *expanded_experts.BACKENDS)
    return {short(tiling): tiling} | {one.name: one.function for one in others if refusal(one, query) is None}


def compile_here(trials: Sequence[Trial]) -> None:
    """For the GPU that is here, on all CPUs."""
    compile_ahead(trials, torch.cuda.get_device_capability(DEVICE), say)


def floor(trials: ExpertTrials, tokens: int) -> tuple[float, int]:
    """Microseconds, and the experts that are hit."""
    product, [gate_up], down = trials.product, trials.weights[0].gate_up, trials.weights[0].down
    hit = int(trials.inputs(tokens)[1].experts.unique().numel())
    size = hit * (gate_up.nbytes + down.nbytes) / product.experts
    operations = 6 * tokens * product.top_k * product.hidden * product.inner
    return 1e6 * max(size / BANDWIDTH, operations / FLOPS), hit


def say(event: Compiling | Trying | Dropped | Tuned) -> None:
    """What a search tells, but for each single trial."""
    match event:
        case Dropped(point, tiling, reason):
            print(f"{point.title} {point.tokens} dropped {tiling}: {reason}", flush=True)
        case Tuned(point, tiling, microseconds, usual):
            print(f"{point.title} {point.tokens} {microseconds} us, was {usual} us, {tiling}", flush=True)


def measure(
    cases: Sequence[tuple[str, str]], tokens: Sequence[int], routings: Sequence[str]
) -> Iterator[Row]:
    """Of each shape and format."""
    products = [product_of(*case) for case in cases]
    compile_here(
        [(one, count, way) for one in products for count in tokens for way in ways(one, count).values()]
    )
    for (shape, form), routing in itertools.product(cases, routings):
        product = product_of(shape, form)
        trials = trials_of(product, routing=routing)
        for count, name, way in ((one, *way) for one in tokens for way in ways(product, one).items()):
            try:
                wrong, us = trials.error(count, way), trials.microseconds(count, way)
            except Exception as error:
                print(f"{shape} {form} {count} {name}: {type(error).__name__}: {error}", flush=True)
                continue
            yield Row(shape, form, routing, count, us, *floor(trials, count), wrong, name)
        del trials
        torch.cuda.empty_cache()


def line(row: Row) -> str:
    return (
        f"{row.shape + ' ' + row.format:19} {row.routing:7} {row.tokens:5} {row.microseconds:7.1f} us, "
        f"floor {row.least:6.1f} us ({row.least / row.microseconds:4.0%}), {row.hit:3} experts, "
        f"err {row.error:.1e} {row.way}"
    )


def tune(cases: Sequence[tuple[str, str]], tokens: Sequence[int], table: Path) -> None:
    found = read_table(table) if table.exists() else []
    points = points_of([product_of(*case) for case in cases], tokens)
    for entry in measured(points, torch.cuda.get_device_capability(DEVICE), say):
        assert isinstance(entry, Measurement)
        found = replaced(found, entry)
        write_table(table, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--formats", nargs="+", default=USUAL, choices=FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--routing", nargs="+", default=list(ROUTING), choices=ROUTING)
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--tune", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    cases = list(itertools.product(args.shapes, args.formats))
    if args.tune:
        tune(cases, args.tokens, args.tune)
    else:
        rows: list[Row] = []
        for row in measure(cases, args.tokens, args.routing):
            print(line(row), flush=True)
            rows.append(row)
            if args.out:
                args.out.write_text(json.dumps([asdict(one) for one in rows], indent=1))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
