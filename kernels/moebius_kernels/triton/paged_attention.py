"""Attention over pages: a launch for the requests with one row each, and one for the others."""

import torch

from moebius_kernels import paged_attention as reference
from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.device_plan import MAX_HEADS, DeviceAttentionPlan
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.registry import Backend, Query
from moebius_kernels.triton.decode_attention import decode_attention
from moebius_kernels.triton.prefill_attention import prefill_attention
from moebius_kernels.triton.targets import ARCHITECTURES
from moebius_kernels.triton.write_kv import admits_pages

_LARGEST_DIM = 576


def paged_attention(
    q: torch.Tensor,
    kv_pages: KvPages,
    plan: AttentionPlan | DeviceAttentionPlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `moebius_kernels.paged_attention.paged_attention`."""
    if isinstance(plan, AttentionPlan):
        return reference.paged_attention(q, kv_pages, plan, scale=scale, softcap=softcap, sinks=sinks)
    output = q.new_empty(*q.shape[:2], kv_pages.value_dim)
    factor = kv_pages.key_dim**-0.5 if scale is None else scale
    decode_attention(q, kv_pages, plan, output, factor, softcap, sinks)
    prefill_attention(q, kv_pages, plan, output, factor, softcap, sinks)
    return output


def _admits(query: Query) -> str | None:
    heads, dim = query.arguments["q"].shape
    if heads > MAX_HEADS or dim > _LARGEST_DIM:
        return f"{heads} heads of {dim}; it takes {MAX_HEADS} of up to {_LARGEST_DIM}"
    return admits_pages(query)


BACKENDS = (
    Backend(
        "paged_attention",
        "triton",
        paged_attention,
        architectures=ARCHITECTURES,
        admits=_admits,
    ),
)
