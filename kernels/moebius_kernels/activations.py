"""The gated activations between the two halves of a feed-forward network."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Silu:
    """`silu(gate) * up`: SwiGLU."""


@dataclass(frozen=True, slots=True)
class GeluTanh:
    """`gelu(gate) * up` with the tanh approximation of GELU (Gemma)."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`gate * sigmoid(alpha * gate) * (up + 1)`; the gate is at most `limit`, up within +-limit (gpt-oss)."""

    limit: float = 7.0
    alpha: float = 1.702


Activation = Silu | GeluTanh | ClampedSwiglu

SILU = Silu()
GELU_TANH = GeluTanh()


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up [..., 2I], the gate in its first half -> [..., I] in its dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    match activation:
        case Silu():
            return F.silu(gate) * up
        case GeluTanh():
            return F.gelu(gate, approximate="tanh") * up
        case ClampedSwiglu(limit=limit, alpha=alpha):
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            return gate * torch.sigmoid(alpha * gate) * (up + 1)
