"""Which rows of a step belong to which linear state: found once a step, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moebius_kernels.attention_plan import Span


@dataclass(frozen=True, slots=True)
class Segment:
    """Several rows of one request, `first_row` to `last_row` (excluded), and the slot of its state."""

    first_row: int
    last_row: int
    slot: int


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Requests with one row each are computed together: `rows` and `slots` int64 [B]. The others alone."""

    rows: torch.Tensor
    slots: torch.Tensor
    segments: tuple[Segment, ...]


def plan_states(spans: Sequence[Span], slots: Sequence[int], device: torch.device) -> StatePlan:
    """Plans a step whose rows are those of `spans`, one after another; `slots`: of each, no two alike."""
    decode_rows: list[int] = []
    decode_slots: list[int] = []
    segments: list[Segment] = []
    row = 0
    for span, slot in zip(spans, slots, strict=True):
        if span.length == 1:
            decode_rows.append(row)
            decode_slots.append(slot)
        else:
            segments.append(Segment(row, row + span.length, slot))
        row += span.length
    return StatePlan(
        torch.tensor(decode_rows, dtype=torch.int64, device=device),
        torch.tensor(decode_slots, dtype=torch.int64, device=device),
        tuple(segments),
    )
