"""What trials of tilings launch, without a GPU: their products on the device "meta", which has no numbers.

The launches are those of `tune_trials.py`, with tensors of the same sizes, types and strides: kernels are
compiled for these, for numbers among the arguments, and for addresses that are multiples of 16, as all are.
"""

import contextlib
import signal
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moebius_common.cpus import cpu_count
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.jit.triton_ahead import Compilation, collected, compile_all, pretend
from moebius_kernels.registry import Architecture
from moebius_kernels.router import Route
from moebius_kernels.triton.tune_ahead import Trial
from moebius_kernels.triton.tune_process import SECONDS
from moebius_kernels.triton.tune_trials import compute_experts, multiply, norm
from moebius_kernels.tuning import ExpertProduct, Product

_META = torch.device("meta")


def compile_trials(
    trials: Iterable[Trial], architecture: Architecture, done: Callable[[int, int], None]
) -> None:
    """In a process without CUDA, which can launch nothing afterwards. `done` is told how many kernels are
    compiled, and of how many."""
    # Ctrl-C reaches this process and all that it forks, and none of them has anything to say or to save.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pretend(architecture)
    compilations = launched(trials)
    total = len(compilations)
    done(0, total)
    compile_all(compilations, cpu_count(), int(SECONDS), lambda finished: done(finished, total))


def launched(trials: Iterable[Trial]) -> list[Compilation]:
    """Each kernel once. The process must `pretend` to have a GPU."""
    with collected() as compilations:
        for trial in trials:
            # What raises here does so when it is measured, where it is told.
            with contextlib.suppress(Exception):
                _launch(*trial)
    return compilations


def _launch(product: Product, tokens: int, way: Any) -> None:
    if isinstance(product, ExpertProduct):
        _launch_experts(product, tokens, way)
    else:
        block = StoredMatrix.empty(product.format, (product.rows, product.columns), _META)
        normed = norm(_bf16(tokens, product.columns), _bf16(product.columns))
        multiply(normed, block, _bf16(tokens, product.rows), way)


def _launch_experts(product: ExpertProduct, tokens: int, way: Any) -> None:
    pairs = tokens, product.top_k
    experts = torch.empty(pairs, dtype=torch.int64, device=_META)
    route = Route(torch.empty(pairs, device=_META), experts)
    compute_experts(_bf16(tokens, product.hidden), route, sizes_of(product), way)


def sizes_of(product: ExpertProduct) -> ExpertWeights:
    """Its weights on "meta"."""
    gate_up = StoredMatrix.empty(product.gate_up, (product.experts, 2 * product.inner, product.hidden), _META)
    down = StoredMatrix.empty(product.down, (product.experts, product.hidden, product.inner), _META)
    return ExpertWeights([gate_up], down)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=_META)
