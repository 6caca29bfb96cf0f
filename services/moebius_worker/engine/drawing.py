"""What random draws need to know of the rows of a batch."""

import math
from collections.abc import Sequence

import torch

from moebius_kernels.sampling import CANDIDATES, Draws, stream_of
from moebius_worker.engine.types import SampleRow


def draws_of(rows: Sequence[SampleRow], device: torch.device) -> Draws:
    """For `Operations.draw_tokens`. On its way to a GPU nobody waits for it."""
    params = [row.params for row in rows]
    truncated = any(one.top_k > 0 or one.top_p < 1 for one in params)
    streams = [stream_of(one.seed) for one in params]
    # One copy: of int64 two columns, then of fp32 three, then of int32 one.
    host = torch.empty(8 * len(rows), dtype=torch.int32, pin_memory=device.type == "cuda")
    integers, numbers, choices = _columns(host, len(rows))
    integers.numpy()[:] = streams, [row.position for row in rows]
    numbers.numpy()[:] = (
        [one.temperature for one in params],
        [one.top_p for one in params],
        [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params],
    )
    choices.numpy()[:] = [one.top_k for one in params]
    (streams_there, positions), (temperature, top_p, log_min_p), top_k = _columns(
        host.to(device, non_blocking=True), len(rows)
    )
    return Draws(
        streams=streams_there,
        positions=positions,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        log_min_p=log_min_p,
        candidates=max(CANDIDATES, *(one.top_k for one in params)) if truncated else 0,
    )


def _columns(table: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 [8 * rows] as int64 [2, rows], fp32 [3, rows] and int32 [rows]."""
    integers, numbers, choices = table.split([4 * rows, 3 * rows, rows])
    return integers.view(torch.int64).view(2, rows), numbers.view(torch.float32).view(3, rows), choices
