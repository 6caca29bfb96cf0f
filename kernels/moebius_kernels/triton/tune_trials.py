"""Tilings of a product on the device that is here: what they compute, and how long that takes.

Weights are random. A time is the median of replays of a CUDA graph that goes once through several sets of
weights, more than the L2 holds. Experts: everything between the router's output and the layer's. Dense
products: with a norm before each, as in a model, since a tiling may fetch codes while that runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as reference
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.router import Route, topk_softmax
from moebius_kernels.triton.experts import tiled_experts
from moebius_kernels.triton.linear import tiled_linear
from moebius_kernels.triton.rms_norm import rms_norm
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from moebius_kernels.tuning import DenseProduct, ExpertProduct, Product

# Such a relative error is a fault, and no rounding.
WRONG = 0.02
REPEATS = 7
# So many times the L2 are read before a set of weights comes again, in at most so many sets.
_CACHES, _MOST_SETS = 4, 64
# Where tokens are many, a product takes so long that few make a figure.
_FEW_SETS, _MANY_TOKENS = 3, 512
# Of y, rows of the matrix that are compared: heads have as many as words.
_COMPARED_ROWS = 4096

# `tiled_experts` with some tiling, or what computes the same: x, route, weights, activation.
Experts = Callable[[torch.Tensor, Route, ExpertWeights, Activation], torch.Tensor]
# `tiled_linear` with some tiling, or what computes the same: x, matrix, bias, y.
Multiply = Callable[[torch.Tensor, StoredMatrix, torch.Tensor | None, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Figures:
    """`error`: relative, against the reference; a wrong tiling has no time."""

    error: float
    microseconds: float | None


class ExpertTrials:
    def __init__(self, product: ExpertProduct, sets: int, device: torch.device) -> None:
        self.product, self.device = product, device
        generator = torch.Generator(device).manual_seed(0)
        gate_up, down = (
            copies(random_matrix(form, (product.experts, *shape), generator), sets)
            for form, shape in (
                (product.gate_up, (2 * product.inner, product.hidden)),
                (product.down, (product.hidden, product.inner)),
            )
        )
        self.weights = [ExpertWeights([one], other) for one, other in zip(gate_up, down, strict=True)]
        self._expected: dict[int, torch.Tensor] = {}

    def inputs(self, tokens: int, seed: int = 0) -> tuple[torch.Tensor, Route]:
        """x [T, H] and where its rows go: uniformly."""
        generator = torch.Generator(self.device).manual_seed(seed)
        x = torch.randn(tokens, self.product.hidden, generator=generator, device=self.device).bfloat16()
        logits = torch.randn(tokens, self.product.experts, generator=generator, device=self.device)
        return x, topk_softmax(logits, self.product.top_k)

    def run(self, tokens: int, way: ExpertTiling | Experts) -> torch.Tensor:
        return compute_experts(*self.inputs(tokens), self.weights[0], way)

    def error(self, tokens: int, way: ExpertTiling | Experts) -> float:
        if tokens not in self._expected:
            x, route = self.inputs(tokens)
            self._expected = {tokens: reference(x.float(), route, self.weights[0], SILU)}
        with poisoned():
            y = self.run(tokens, way)
        return relative_error(y, self._expected[tokens])

    def microseconds(self, tokens: int, way: ExpertTiling | Experts) -> float:
        weights = self.weights if tokens <= _MANY_TOKENS else self.weights[:_FEW_SETS]
        given = [self.inputs(tokens, seed) for seed in range(len(weights))]

        def run() -> None:
            for (x, route), layer in zip(given, weights, strict=True):
                compute_experts(x, route, layer, way)

        return replayed(run) / len(weights)


def compute_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, way: ExpertTiling | Experts
) -> torch.Tensor:
    if isinstance(way, ExpertTiling):
        return tiled_experts(x, route, weights, SILU, way)
    return way(x, route, weights, SILU)


class DenseTrials:
    def __init__(self, product: DenseProduct, sets: int, device: torch.device) -> None:
        self.product, self.device = product, device
        generator = torch.Generator(device).manual_seed(0)
        block = random_matrix(product.format, (product.rows, product.columns), generator)
        self.blocks = copies(block, sets)
        self._expected: dict[int, torch.Tensor] = {}

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, C], and memory for y [T, R]."""
        generator = torch.Generator(self.device).manual_seed(0)
        x = torch.randn(tokens, self.product.columns, generator=generator, device=self.device).bfloat16()
        return x, torch.empty(tokens, self.product.rows, device=self.device, dtype=torch.bfloat16)

    def run(self, tokens: int, way: Tiling | Multiply) -> torch.Tensor:
        x, y = self.inputs(tokens)
        multiply(x, self.blocks[0], y, way)
        return y

    def error(self, tokens: int, way: Tiling | Multiply) -> float:
        rows = min(self.product.rows, _COMPARED_ROWS)
        if tokens not in self._expected:
            wide = self.blocks[0].narrow_rows(0, rows).dequantize()
            self._expected = {tokens: self.inputs(tokens)[0].float() @ wide.T}
        with poisoned():
            y = self.run(tokens, way)
        return relative_error(y[:, :rows], self._expected[tokens])

    def microseconds(self, tokens: int, way: Tiling | Multiply | None) -> float:
        """With the norm that comes before; of that alone if there is no way."""
        x, y = self.inputs(tokens)
        weight = torch.ones(self.product.columns, device=self.device).bfloat16()

        def run() -> None:
            for block in self.blocks:
                normed = norm(x, weight)
                if way is not None:
                    multiply(normed, block, y, way)

        return replayed(run) / len(self.blocks)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What comes before a dense product."""
    return rms_norm(x, weight, 1e-6)


def multiply(x: torch.Tensor, block: StoredMatrix, y: torch.Tensor, way: Tiling | Multiply) -> None:
    if isinstance(way, Tiling):
        tiled_linear(x, block, None, y, way)
    else:
        way(x, block, None, y)


class Trials:
    """Answers (product, tokens, tiling), one product after another. Raises whatever a tiling raises."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cuda")
        self._made: tuple[Product, ExpertTrials | DenseTrials] | None = None

    def __call__(self, request: tuple[Product, int, ExpertTiling | Tiling]) -> Figures:
        product, tokens, tiling = request
        trials = self._of(product)
        error = trials.error(tokens, tiling)  # type: ignore[arg-type]
        if not error < WRONG:
            return Figures(error, None)
        return Figures(error, trials.microseconds(tokens, tiling))  # type: ignore[arg-type]

    def well(self) -> bool:
        """Whether the device still works after a tiling that raised."""
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True

    def _of(self, product: Product) -> ExpertTrials | DenseTrials:
        if self._made is None or self._made[0] != product:
            # Its weights go before others come.
            self._made = None
            torch.cuda.empty_cache()
            self._made = product, self._new(product)
        return self._made[1]

    def _new(self, product: Product) -> ExpertTrials | DenseTrials:
        sets = sets_of(product, self.device)
        if isinstance(product, DenseProduct):
            return DenseTrials(product, sets, self.device)
        return ExpertTrials(product, sets, self.device)


def sets_of(product: Product, device: torch.device) -> int:
    """How many sets of weights make a token find none of its own in the L2, if there is memory for them."""
    meta = torch.device("meta")
    if isinstance(product, ExpertProduct):
        gate_up = StoredMatrix.empty(product.gate_up, (2 * product.inner, product.hidden), meta)
        down = StoredMatrix.empty(product.down, (product.hidden, product.inner), meta)
        nbytes = product.experts * (gate_up.nbytes + down.nbytes)
        read = nbytes * product.top_k // product.experts
    else:
        nbytes = read = StoredMatrix.empty(product.format, (product.rows, product.columns), meta).nbytes
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    free, _ = torch.cuda.mem_get_info(device)
    wanted = min(max(2, -(-_CACHES * cache // read)), _MOST_SETS)
    # Half of the memory is for what the products leave in it.
    return int(max(1, min(wanted, free // 2 // nbytes)))


def copies(matrix: StoredMatrix, count: int) -> Sequence[StoredMatrix]:
    """The same numbers at other addresses, which is what caches look at."""
    parts = [{name: part.clone() for name, part in matrix.parts.items()} for _ in range(count - 1)]
    return [matrix, *(StoredMatrix(matrix.format, matrix.shape, one) for one in parts)]


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN: what a tiling does not write must not be what another one wrote."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN where y is."""
    return float((y.float() - expected.float()).norm() / expected.float().norm())


def replayed(run: Callable[[], None], repeats: int = REPEATS) -> float:
    """Median microseconds of replays of a CUDA graph of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
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
