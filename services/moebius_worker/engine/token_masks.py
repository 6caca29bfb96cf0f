"""Masks of allowed tokens, from rows of bits to logits."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from moebius_worker.engine.types import SampleRow


def mask_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Minus infinity where a row's mask has no bit. fp32 [N, vocab].

    `logits` is not changed, but may be what is returned. Rows without a mask stay as they are.
    """
    masked = [(index, row.allowed) for index, row in enumerate(rows) if row.allowed is not None]
    if not masked:
        return logits
    indices = [index for index, _ in masked]
    packed = np.stack([allowed for _, allowed in masked]).view(np.uint8)
    barred = _unpacked(packed, logits.device)[:, : logits.shape[1]] == 0
    if len(indices) == len(rows):
        return logits.masked_fill(barred, float("-inf"))
    logits = logits.clone()
    logits[indices] = logits[indices].masked_fill_(barred, float("-inf"))
    return logits


def _unpacked(packed: NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Bytes [N, n] as bits, uint8 [N, 8 n]; they go to a GPU packed, an eighth as much."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little"))
    places = torch.arange(8, dtype=torch.uint8, device=device)
    bits = torch.from_numpy(packed).to(device).unsqueeze(-1) >> places
    return (bits & 1).flatten(1)
