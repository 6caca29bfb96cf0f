"""CUDA graphs of decode steps, one for each of some sizes: a step is then one launch for the CPU."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
import torch

from moebius_kernels.operations import Operations
from moebius_worker.engine.cuda_graph import capture_graph
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.kinds import only_kinds
from moebius_worker.engine.step_inputs import DeviceInputs
from moebius_worker.engine.types import Slice

log = structlog.get_logger(__name__)

# Up to here each size has a graph of its own: with so few rows one that does not exist would cost most.
_EXACT = 8


def graph_sizes(max_running: int) -> tuple[int, ...]:
    """1 to 8, then steps of 4 to 32, of 8 to 64, of 16 to 256, of 32 beyond; the last is `max_running`."""
    sizes = [
        *range(1, _EXACT + 1),
        *range(12, 33, 4),
        *range(40, 65, 8),
        *range(80, 257, 16),
        *range(288, max_running + 32, 32),
    ]
    return (*(size for size in sizes if size < max_running), max_running)


class DecodeGraphs:
    """`run` computes a step of decodes with the smallest graph that it fits in."""

    def __init__(self, model: Decoder, inputs: DeviceInputs, operations: Operations) -> None:
        self._model, self._inputs, self._operations = model, inputs, operations
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._sizes: list[int] = []

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], progress: Callable[[str, int, int], None]) -> None:
        """The largest first, whose memory the others share."""
        # Graphs have memory of their own: what others have left is given back, once.
        torch.cuda.empty_cache()
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        for done, size in enumerate(sorted(sizes, reverse=True)):
            progress("capturing CUDA graphs", done, len(sizes))
            context = self._inputs.context((), pad_to=size)
            with self._bound(size):
                # Rows that do not exist: what is loaded or allocated once is loaded and allocated here.
                with only_kinds(self._model):
                    self._step(context)
                torch.cuda.synchronize()
                self._graphs[size] = capture_graph(partial(self._step, context), stream, pool)
        self._sizes = sorted(self._graphs)
        log.info("CUDA graphs captured", sizes=self._sizes)

    def fits(self, slices: Sequence[Slice]) -> bool:
        return (
            bool(self._sizes)
            and len(slices) <= self._sizes[-1]
            and all(len(piece.token_ids) == 1 for piece in slices)
        )

    def run(self, slices: Sequence[Slice], drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Logits fp32 [slices, vocab] of what `fits`, in force until the next step. `drawn`: as of
        `StepInputs`."""
        size = self._sizes[bisect_left(self._sizes, len(slices))]
        self._inputs.context(slices, pad_to=size, drawn=drawn)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[: len(slices)]

    def _step(self, context: StepContext) -> torch.Tensor:
        # The angles of positions belong to the step: each has to compute them.
        return self._model.logits(self._model.forward(replace(context, _angles={}), lambda: None))

    @contextmanager
    def _bound(self, size: int) -> Iterator[None]:
        """Rows that do not exist are NaN from the start, for which routers' kernels choose no experts: those
        would be read for nothing."""
        if size > _EXACT:
            self._model.bind(_without_padding(self._operations, self._inputs.absent))
        try:
            yield
        finally:
            self._model.bind(self._operations)


def _without_padding(operations: Operations, absent: torch.Tensor) -> Operations:
    def embedding(token_ids: torch.Tensor, *args: Any) -> torch.Tensor:
        rows = operations.embedding(token_ids, *args)
        return rows.masked_fill_(absent[: len(token_ids), None], math.nan)

    return replace(operations, embedding=embedding)
