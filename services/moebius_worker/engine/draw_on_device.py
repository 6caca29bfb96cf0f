"""Random draws on a GPU: those of `draw.py`, and nobody waits."""

import math
from collections.abc import Sequence

import torch

from moebius_kernels.triton.sampling import Draws, draw_tokens
from moebius_worker.engine.draw import CANDIDATES, stream_of
from moebius_worker.engine.types import SampleRow, SamplingParams


def draw_on_device(logits: torch.Tensor, rows: Sequence[SampleRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids int64 [N] and each row's largest logit fp32 [N], both still on the device, of logits fp32
    [N, vocab]; rows with temperature 0 get their most probable token."""
    return draw_tokens(logits.contiguous(), _draws(rows, logits.device))


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Compiles what draws need, with and without top-k."""
    logits = torch.zeros(1, vocab_size, device=device)
    for params in (SamplingParams(), SamplingParams(top_k=2)):
        draw_on_device(logits, [SampleRow(params, (), ())])


def _draws(rows: Sequence[SampleRow], device: torch.device) -> Draws:
    params = [row.params for row in rows]
    cut = any(one.top_k > 0 or one.top_p < 1 for one in params)
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
        candidates=max(CANDIDATES, *(one.top_k for one in params)) if cut else 0,
    )


def _sent(
    dtype: torch.dtype, columns: list[list[int]] | list[list[float]], device: torch.device
) -> torch.Tensor:
    return torch.tensor(columns, dtype=dtype).pin_memory().to(device, non_blocking=True)
