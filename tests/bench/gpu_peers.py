"""Routed experts beside other engines' on the same GPU, with the same weights, inputs and routes.

    python -m tests.bench.gpu_peers [--cases qwen3:nvfp4 ...] [--tokens 1 8 ...] [--vllm PATH] [--out FILE]

Peers: Humming, if `humming-kernels` is installed; vLLM's Marlin and Triton experts, if PATH is where a wheel
of vLLM 0.33 is unpacked (`_moe_C_stable_libtorch.abi3.so` for Marlin, `fused_moe/fused_moe.py` with its
`configs`, `quantization/utils/fp8_utils.py`, and for gpt-oss's MXFP4 `third_party/triton_kernels`). From
router output to weighted sum, uniform routing, weights rotated beyond the L2, CUDA graphs replayed. Of our
backends those that a preflight would try. Each case has a process, so that one that dies takes no other
along; all compile at once, as we do, then measure in turns. They share the GPU's memory: cases of FP8, which
most peers compute, fit one at a time.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from moebius_kernels.activations import Activation, ClampedSwiglu
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as reference
from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.format import Format
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.pack import packed_format
from moebius_kernels.registry import Backend, gather, refusal
from moebius_kernels.router import Route, topk_softmax
from moebius_kernels.triton.tune_ahead import Trial
from moebius_kernels.triton.tune_trials import poisoned, relative_error, replayed, sets_of
from moebius_kernels.tuning import ExpertProduct
from tests.bench.gpu_experts import compile_here, query_of
from tests.bench.peers.layer import SHAPES, Experts, Shape, packed, random_layer, wide

FORMATS: dict[str, Format] = {
    "bf16": Dense(torch.bfloat16),
    "fp8_block": Fp8(128, 128, True),
    "nvfp4": Nvfp4(),
    "mxfp4": Mxfp4(),
    "int4": IntGroup(4, 128, False, torch.bfloat16),
}
DEFAULT = ("qwen3:nvfp4", "gpt-oss:mxfp4", "qwen3:bf16", "qwen3:fp8_block", "qwen3:mxfp4", "qwen3:int4")
# Relative; of FP8 activations the second.
WRONG, WRONG_FP8 = 0.02, 0.08
# Seconds: to compile everything, and for a measurement.
_COMPILING, _MEASURING = 75, 20
# What the processes of cases are told.
_COMPILED, _GO = "our kernels are compiled", "go"
# Of weights: everybody has as many.
_MOST_SETS = 16


@dataclass(frozen=True, slots=True)
class Row:
    """`microseconds` None: it failed, or is wrong. `error`: relative, against the reference."""

    case: str
    tokens: int
    backend: str
    error: float | None = None
    microseconds: float | None = None
    reason: str = ""


class Contest:
    """A layer, and everybody who computes it."""

    def __init__(self, case: str, vllm: Path | None) -> None:
        name, _, form_name = case.partition(":")
        form, device = FORMATS[form_name], torch.device("cuda")
        self.case, self.shape = case, _shape_of(case)
        self.sets = min(sets_of(_product_of(case), device), _MOST_SETS)
        layer = random_layer(form, self.shape, device)
        self.wide = wide(layer)
        own = packed(layer)
        self.layers = [own, *(_copy(own) for _ in range(self.sets - 1))]
        self.peers: dict[str, Experts] = {}
        self.missing: dict[str, str] = {}
        self._inputs: dict[tuple[int, int], tuple[torch.Tensor, Route]] = {}
        quantised = not isinstance(form, Dense)
        if quantised:
            self._add("humming", lambda: self._humming(layer))
        if isinstance(form, Fp8):
            self._add("humming a8", lambda: self._humming(layer, fp8_activations=True))
        if quantised and vllm is not None:
            self._add("marlin", lambda: self._marlin(layer, vllm))
        if isinstance(form, Fp8 | Dense) and vllm is not None:
            self._add("vllm", lambda: self._vllm(layer, vllm))
        if name == "gpt-oss" and isinstance(form, Mxfp4) and vllm is not None:
            self._add("vllm", lambda: self._mxfp4(layer, vllm))

    def _add(self, name: str, make: Callable[[], Experts]) -> None:
        try:
            self.peers[name] = make()
        except Exception as error:
            self.missing[name] = _said(error)

    def backends(self, tokens: int) -> dict[str, Experts]:
        """Ours first."""

        def ours(function: Callable[..., torch.Tensor]) -> Experts:
            return lambda x, route, index: function(x, route, self.layers[index], self.shape.activation)

        return {one.name: ours(one.bind()) for one in candidates(self.case, tokens)} | self.peers

    def _humming(self, layer: ExpertWeights, *, fp8_activations: bool = False) -> Experts:
        from tests.bench.peers.humming_experts import HummingExperts

        return HummingExperts(layer, self.shape.activation, self.sets, fp8_activations=fp8_activations)

    def _marlin(self, layer: ExpertWeights, package: Path) -> Experts:
        from tests.bench.peers.marlin_experts import MarlinExperts

        return MarlinExperts(layer, self.shape.activation, self.sets, package)

    def _vllm(self, layer: ExpertWeights, package: Path) -> Experts:
        from tests.bench.peers.vllm_experts import VllmExperts

        layers = [layer, *(_copy(layer) for _ in range(self.sets - 1))]
        return VllmExperts(layers, self.shape.activation, package)

    def _mxfp4(self, layer: ExpertWeights, package: Path) -> Experts:
        from tests.bench.peers.mxfp4_experts import Mxfp4Experts

        assert isinstance(self.shape.activation, ClampedSwiglu)
        return Mxfp4Experts(layer, self.shape.activation, self.sets, package)

    def inputs(self, tokens: int, seed: int = 0) -> tuple[torch.Tensor, Route]:
        """They stay: a peer knows a route by its address."""
        if (tokens, seed) not in self._inputs:
            generator = torch.Generator("cuda").manual_seed(seed)
            x = torch.randn(tokens, self.shape.hidden, generator=generator, device="cuda").bfloat16()
            logits = torch.randn(tokens, self.shape.experts, generator=generator, device="cuda")
            self._inputs[tokens, seed] = x, topk_softmax(logits, self.shape.top_k)
        return self._inputs[tokens, seed]

    def compile(self, tokens: Sequence[int]) -> None:
        """Everything of the peers, side by side; what cannot be compiled is told by `errors`."""

        def prepare(run: Experts, counts: Sequence[int]) -> None:
            if compiler := getattr(run, "compile", None):
                compiler([count * self.shape.top_k for count in counts])
            for count in counts:
                with contextlib.suppress(Exception):
                    run(*self.inputs(count), 0)

        for count in tokens:
            self.inputs(count)
        with ThreadPoolExecutor() as threads:
            for run in self.peers.values():
                # Humming has processes of its own; Triton compiles in whatever thread launches.
                for counts in [tokens] if hasattr(run, "compile") else [[count] for count in tokens]:
                    threads.submit(prepare, run, counts)

    def errors(self, tokens: Sequence[int]) -> Iterator[tuple[int, str, float | str]]:
        """Everything once; tells errors, relative or in words."""
        for count in tokens:
            x, route = self.inputs(count)
            expected = reference(x.float(), route, self.wide, self.shape.activation)
            for name, run in self.backends(count).items():
                try:
                    with poisoned():
                        yield count, name, relative_error(run(x, route, 0), expected)
                except Exception as error:
                    yield count, name, _said(error)

    def microseconds(self, tokens: int, name: str) -> float:
        run, sets = self.backends(tokens)[name], self.sets if tokens <= 512 else min(self.sets, 3)
        given = [self.inputs(tokens, seed) for seed in range(sets)]

        def all_sets() -> None:
            for index, (x, route) in enumerate(given):
                run(x, route, index)

        return replayed(all_sets) / sets


@dataclass(frozen=True, slots=True)
class OfShape:
    """A backend's function with the activation and the biases that a shape has."""

    function: Callable[..., torch.Tensor]
    shape: Shape

    def __call__(
        self, x: torch.Tensor, route: Route, weights: ExpertWeights, activation: Activation
    ) -> torch.Tensor:
        if self.shape.bias:
            experts, hidden, inner = weights.down.shape
            gate_up, down = (x.new_empty(experts, rows) for rows in (2 * inner, hidden))
            weights = replace(weights, gate_up_bias=gate_up, down_bias=down)
        return self.function(x, route, weights, self.shape.activation)


def candidates(case: str, tokens: int) -> list[Backend]:
    """Of ours."""
    query = query_of(_product_of(case), tokens, _shape_of(case).activation)
    backends = gather(("moebius_kernels.triton",)).of("routed_experts")
    return [one for one in backends if not one.is_reference and refusal(one, query) is None]


def trials_of(case: str, tokens: Sequence[int]) -> list[Trial]:
    """Of ours."""
    product, shape = _product_of(case), _shape_of(case)
    return [
        (product, count, OfShape(one.function, shape)) for count in tokens for one in candidates(case, count)
    ]


def _shape_of(case: str) -> Shape:
    return SHAPES[case.partition(":")[0]]


def _product_of(case: str) -> ExpertProduct:
    """As our kernels read it."""
    form, shape = packed_format(FORMATS[case.partition(":")[2]]), _shape_of(case)
    return ExpertProduct(form, form, shape.experts, shape.top_k, shape.hidden, shape.inner)


def _copy(layer: ExpertWeights) -> ExpertWeights:
    """The same numbers at other addresses."""

    def copied(matrix: Any) -> Any:
        parts = {name: part.clone() for name, part in matrix.parts.items()}
        return type(matrix)(matrix.format, matrix.shape, parts)

    return ExpertWeights([copied(layer.gate_up[0])], copied(layer.down), layer.gate_up_bias, layer.down_bias)


def _said(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]


def contest(case: str, tokens: Sequence[int], vllm: Path | None, pipe: Connection) -> None:
    """In a process of its own: compiles the peers' kernels, waits until ours are, computes all once and says
    what is missing, waits for the word to go, and sends rows, then None."""
    try:
        found = Contest(case, vllm)
        found.compile(tokens)
        pipe.recv()
        errors = {(count, name): error for count, name, error in found.errors(tokens)}
    except Exception as failure:
        pipe.send([Row(case, 0, "all", reason=_said(failure))])
        while pipe.recv() != _GO:
            pass
        pipe.send(None)
        return
    pipe.send([Row(case, 0, name, reason=reason) for name, reason in found.missing.items()])
    pipe.recv()
    for (count, name), error in errors.items():
        if isinstance(error, str):
            pipe.send(Row(case, count, name, reason=error))
        elif not error < (WRONG_FP8 if case.endswith("fp8_block") else WRONG):
            pipe.send(Row(case, count, name, error, reason=f"wrong numbers, error {error:.1e}"))
        else:
            try:
                pipe.send(Row(case, count, name, error, found.microseconds(count, name)))
            except Exception as failure:
                pipe.send(Row(case, count, name, error, reason=_said(failure)))
    pipe.send(None)


def measured(cases: Sequence[str], tokens: Sequence[int], vllm: Path | None) -> Iterator[Row]:
    context = multiprocessing.get_context("spawn")
    running = []
    for case in cases:
        here, there = context.Pipe()
        process = context.Process(target=contest, args=(case, tokens, vllm, there), daemon=True)
        process.start()
        there.close()
        running.append((case, here, process))
    deadline = time.monotonic() + _COMPILING
    compile_here([trial for case in cases for trial in trials_of(case, tokens)])
    for _, pipe, _ in running:
        # Of one that has died, below.
        with contextlib.suppress(OSError):
            pipe.send(_COMPILED)
    ready = []
    for case, pipe, process in running:
        try:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"still compiling after {_COMPILING} s")
            yield from pipe.recv()
            ready.append((case, pipe, process))
        except (EOFError, OSError) as error:
            process.kill()
            yield Row(case, 0, "all", reason=f"its process died: {_said(error)}")
    for case, pipe, process in ready:
        try:
            pipe.send(_GO)
            while pipe.poll(_MEASURING) and (row := pipe.recv()) is not None:
                yield row
        except (EOFError, OSError) as error:
            yield Row(case, 0, "all", reason=f"its process died: {_said(error)}")
        process.kill()


def table(rows: Sequence[Row]) -> Iterator[str]:
    """A line a cell: ours, then the peers, each with how many times as long it takes as our best."""
    for case, tokens in dict.fromkeys((row.case, row.tokens) for row in rows):
        here = [row for row in rows if (row.case, row.tokens) == (case, tokens)]
        times = {row.backend: row.microseconds for row in here if row.microseconds is not None}
        ours = min((us for name, us in times.items() if name.startswith("triton")), default=None)
        words = []
        for row in here:
            if row.microseconds is None:
                words.append(f"{row.backend}: {row.reason}")
            else:
                ratio = "" if ours is None else f" ({row.microseconds / ours:.2f})"
                words.append(f"{row.backend} {row.microseconds:.1f}{ratio} err {row.error:.0e}")
        yield f"{case:17} {tokens:5}  {'; '.join(words)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=DEFAULT, help="shape:format")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 32, 64, 128, 8192])
    parser.add_argument("--vllm", type=Path, help="where a vLLM wheel is unpacked")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args()
    began = time.monotonic()
    rows: list[Row] = []
    for _, some in itertools.groupby(measured(args.cases, args.tokens, args.vllm), lambda row: row.case):
        of_case = list(some)
        print(*table(of_case), sep="\n", flush=True)
        rows += of_case
        if args.out:
            args.out.write_text(json.dumps([asdict(one) for one in rows], indent=1))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
