"""The gated activation between the two halves of a feed-forward network."""

import torch
import torch.nn.functional as F


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, where gate_up [..., 2I] holds the gate in its first half; the result is [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
