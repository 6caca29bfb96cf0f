"""Captures what a function launches in a CUDA graph."""

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def capture_graph(
    function: Callable[[], Result], stream: torch.cuda.Stream, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The graph, and the function's result, which each replay writes anew. `pool`: of memory, for graphs that
    are not replayed at the same time.

    `torch.cuda.graph` would also give PyTorch's free memory, pinned memory too, back to the driver, from
    which the next capture takes it again. Raises what `function` raises, and RuntimeError for what cannot be
    captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool)
        try:
            result = function()
        except BaseException:
            # It says that the capture failed, but not why.
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, result
