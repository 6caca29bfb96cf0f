"""Operations that stand for several: fewer launches where these decide. References in plain PyTorch."""

import torch

from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.paged_attention import write_kv
from moebius_kernels.rms_norm import rms_norm
from moebius_kernels.rotary import Angles, apply_rotary


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x + residual` [T, H] in x's dtype, and its `rms_norm`."""
    total = x + residual
    return total, rms_norm(total, weight, eps, offset=offset)


def rotate_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: Angles,
    kv_pages: KvPages,
    plan: AttentionPlan,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """What stands between a layer's projections and its attention: norms over each head (if there are
    weights), rotation, and `write_kv` of keys and values.

    q [T, heads, Dk], k [T, KV, Dk], v [T, KV, Dv]; the result is [T, heads, Dk], the queries as attention
    takes them, NaN in rows whose keys or values could not be kept as they are.
    """
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps, offset=offset), rms_norm(k, k_weight, eps, offset=offset)
    faults = write_kv(apply_rotary(k, angles), v, kv_pages, plan)
    return apply_rotary(q, angles) + faults[:, None, None]
