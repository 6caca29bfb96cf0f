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
    integers = _sent(torch.int64, [streams, [row.position for row in rows]], device)
    choices = _sent(torch.int32, [[one.top_k for one in params]], device)
    numbers = [
        [one.temperature for one in params],
        [one.top_p for one in params],
        [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in params],
    ]
    temperature, top_p, log_min_p = _sent(torch.float32, numbers, device)
    return Draws(
        streams=integers[0],
        positions=integers[1],
        temperature=temperature,
        top_k=choices[0],
        top_p=top_p,
        log_min_p=log_min_p,
        candidates=max(CANDIDATES, *(one.top_k for one in params)) if truncated else 0,
    )


def _sent(
    dtype: torch.dtype, columns: list[list[int]] | list[list[float]], device: torch.device
) -> torch.Tensor:
    table = torch.tensor(columns, dtype=dtype, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
