"""Masks of allowed tokens, from rows of bits to logits."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from moebius_worker.engine.types import SampleRow


def mask_logits(logits: torch.Tensor, rows: Sequence["SampleRow"]) -> torch.Tensor:
    """Minus infinity where a row's mask has no bit. fp32 [N, vocab].

    `logits` is not changed, but may be what is returned. Rows without a mask stay as they are.
    """
    masked = [(index, row.allowed) for index, row in enumerate(rows) if row.allowed is not None]
    if not masked:
        return logits
    indices = [index for index, _ in masked]
    # Bytes: a bit becomes a number of 8 bits for a moment, not of 32.
    table = np.stack([allowed for _, allowed in masked]).view(np.uint8)
    bits = torch.from_numpy(table).to(logits.device).unsqueeze(-1) >> torch.arange(
        8, dtype=torch.uint8, device=logits.device
    )
    barred = (bits & 1).flatten(1)[:, : logits.shape[1]] == 0
    if len(indices) == len(rows):
        return logits.masked_fill(barred, float("-inf"))
    logits = logits.clone()
    logits[indices] = logits[indices].masked_fill_(barred, float("-inf"))
    return logits
