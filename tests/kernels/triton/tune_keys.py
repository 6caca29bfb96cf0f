"""Which kernels are compiled ahead of trials, and which trials then launch, as JSON: by Triton's own keys.

The trials run on the CPU, with weights and addresses, and are told that it is a GPU. Nothing is compiled. A
program of its own: where Triton's interpreter is on, nothing has a key.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton

from moebius_kernels.jit.triton_ahead import pretend
from moebius_kernels.triton import (
    expanded_experts,
    fp8_experts,
    fp8_gemm_hopper,
    gemm,
    hopper_experts,
    targets,
    tune_launches,
    tune_trials,
)
from moebius_kernels.triton.linear import multiply_expanded
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from moebius_kernels.triton.tune_ahead import Trial
from moebius_kernels.tuning import DenseProduct, ExpertProduct
from tests.kernels.triton.matrices import FORMATS

FORMS = ("bf16", "fp8_block", "nvfp4_words", "mxfp4_words", "int4", "int4_words", "int4_zero", "q4_k", "q6_k")
# Specialised values: 1 and multiples of 16; pairs within a program, of one launch and of four.
TOKENS = (1, 2, 8, 16, 40, 100, 600)
EXPERTS = (
    ExpertTiling(Tiling(8, 32, 128), Tiling(8, 64, 128, splits=2, prefetch=True)),
    ExpertTiling(Tiling(64, 64, 64, 4, 4), Tiling(64, 128, 64, swap=False)),
)
DENSE = (Tiling(8, 32, 128), Tiling(64, 64, 64, splits=3), Tiling(8, 16, 256, 2, 4, depth=2))
WAYS = (
    ("bf16", hopper_experts.routed_experts),
    ("nvfp4_words", hopper_experts.routed_experts),
    ("int4_words", hopper_experts.routed_experts),
    ("q4_k", hopper_experts.routed_experts),
    ("q6_k", expanded_experts.routed_experts),
    (
        "fp8_block",
        partial(fp8_experts.tiled_experts, tiling=ExpertTiling(*[Tiling(128, 128, 128, 8, 4)] * 2)),
    ),
)


def trials() -> list[Trial]:
    found: list[Trial] = []
    for form in map(FORMATS.__getitem__, FORMS):
        experts, dense = ExpertProduct(form, form, 24, 4, 768, 256), DenseProduct(form, 384, 768)
        found += [(experts, count, tiling) for count in TOKENS for tiling in EXPERTS]
        found += [(dense, count, tiling) for count in TOKENS for tiling in DENSE]
    found.append((DenseProduct(FORMATS["q4_k"], 384, 768), 40, multiply_expanded))
    return found + [
        (ExpertProduct(FORMATS[form], FORMATS[form], 24, 4, 768, 256), count, way)
        for form, way in WAYS
        for count in (100, 600)
    ]


def noted(run: Callable[[], object]) -> list[str]:
    """The key of each launch, in which nothing is launched."""
    keys: list[str] = []

    def note(*, key: str, fn: Any, **_: Any) -> bool:
        keys.append(f"{fn.name} {key}")
        return True

    triton.knobs.runtime.jit_cache_hook = note
    run()
    return keys


def measure(found: list[Trial]) -> None:
    made: dict[Any, Any] = {}
    device = torch.device("cpu")
    for product, tokens, way in found:
        if product not in made:
            kind = tune_trials.ExpertTrials if isinstance(product, ExpertProduct) else tune_trials.DenseTrials
            made = {product: kind(product, 1, device)}
        made[product].microseconds(tokens, way)
        made[product].run(tokens, way)


def be_a_gpu() -> None:
    """Tensors of the CPU are taken for a GPU's."""
    for module in (gemm, targets, fp8_gemm_hopper):
        module.generation_of = lambda tensor: 9
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)


def main() -> None:
    pretend((9, 0))
    found = trials()
    ahead = noted(partial(tune_launches.launched, found))
    be_a_gpu()
    tune_trials.replayed = lambda run: run() or 1.0
    measured = noted(partial(measure, found))
    json.dump({"ahead": ahead, "measured": measured}, sys.stdout)


if __name__ == "__main__":
    main()
