"""CUDA graphs of decode steps, one for each of some sizes: a step is then one launch for the CPU."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog
import torch

from moebius_kernels.operations import Operations
from moebius_kernels.router import Route
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.step_inputs import DeviceInputs
from moebius_worker.engine.types import Slice

log = structlog.get_logger(__name__)

# Up to here each size has a graph of its own: with so few rows one that does not exist would cost most.
_EXACT = 8


@dataclass(frozen=True, slots=True)
class Decoded:
    """`logits` fp32 [rows, vocab]; `finite` [rows]: whether a row's hidden states are."""

    logits: torch.Tensor
    finite: torch.Tensor


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
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Decoded]] = {}
        self._sizes: list[int] = []

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], progress: Callable[[str, int, int], None]) -> None:
        """The largest first, whose memory the others share."""
        pool = None
        for done, size in enumerate(sorted(sizes, reverse=True)):
            progress("capturing CUDA graphs", done, len(sizes))
            context = self._inputs.context((), pad_to=size)
            with self._bound(size):
                # Rows that do not exist: what is compiled or allocated once is compiled and allocated here.
                self._step(context)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    decoded = self._step(context)
            pool = pool or graph.pool()
            self._graphs[size] = graph, decoded
        self._sizes = sorted(self._graphs)
        log.info("CUDA graphs captured", sizes=self._sizes)

    def fits(self, slices: Sequence[Slice]) -> bool:
        return (
            bool(self._sizes)
            and len(slices) <= self._sizes[-1]
            and all(len(piece.token_ids) == 1 for piece in slices)
        )

    def run(self, slices: Sequence[Slice], drawn: torch.Tensor | None = None) -> Decoded:
        """What `fits`; the result is in force until the next step. `drawn`: as of `StepInputs`."""
        size = self._sizes[bisect_left(self._sizes, len(slices))]
        self._inputs.context(slices, pad_to=size, drawn=drawn)
        graph, decoded = self._graphs[size]
        graph.replay()
        return Decoded(decoded.logits[: len(slices)], decoded.finite[: len(slices)])

    def _step(self, context: StepContext) -> Decoded:
        # The angles of positions belong to the step: each has to compute them.
        hidden = self._model.forward(replace(context, _angles={}), lambda: None)
        return Decoded(self._model.logits(hidden), hidden.isfinite().all(dim=-1))

    @contextmanager
    def _bound(self, size: int) -> Iterator[None]:
        """Rows that do not exist have no experts: those would be read for nothing."""
        if size > _EXACT:
            self._model.bind(_without_padding(self._operations, self._inputs.absent))
        try:
            yield
        finally:
            self._model.bind(self._operations)


def _without_padding(operations: Operations, absent: torch.Tensor) -> Operations:
    def masked(router: Callable[..., Route]) -> Callable[..., Route]:
        def route(logits: torch.Tensor, *args: object, **kwargs: object) -> Route:
            found = router(logits, *args, **kwargs)
            found.experts.masked_fill_(absent[: len(logits), None], -1)
            return found

        return route

    return replace(
        operations,
        topk_softmax=masked(operations.topk_softmax),
        softmax_topk=masked(operations.softmax_topk),
        sigmoid_topk=masked(operations.sigmoid_topk),
    )
