"""Normalisation of the last dimension by its length."""

from typing import Literal

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` over the last dimension, in fp32.

    x [..., H], weight [H], None for none; the result has x's shape and dtype. `offset` is 1 for weights that
    are stored as their distance from 1 (Qwen3-Next).
    """
    if weight is not None:
        weight = weight.float() + offset if offset else weight.float()
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> torch.Tensor:
    """`rms_norm(x) * act(z)`, in fp32: x and z [..., H], weight [H]; the result is in x's dtype."""
    gate = F.silu(z.float()) if activation == "silu" else z.float().sigmoid()
    return (F.rms_norm(x.float(), weight.shape, weight.float(), eps) * gate).to(x.dtype)


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """`x / sqrt(sum(x^2) + eps)` over the last dimension, in fp32; the result is in x's dtype."""
    wide = x.float()
    return (wide * (wide.square().sum(dim=-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
