"""Attention over pages for steps with prompts on Hopper (`prefill_attention_hopper.py`).

On an H200 a layer of Qwen3-30B-A3B takes 824 us for 8,192 tokens, where tiles without a division of labour
take 1,295.
"""

import torch

from moebius_kernels import paged_attention as reference
from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.device_plan import MAX_HEADS, DeviceAttentionPlan
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.registry import Backend, Query
from moebius_kernels.triton.admission import pages_refusal
from moebius_kernels.triton.decode_attention import decode_attention
from moebius_kernels.triton.prefill_attention_hopper import prefill_attention

# Steps of fewer are decodes for the most part.
_FEWEST_TOKENS = 512
_DIMS = (64, 128)
# Rows of a page, of which shared memory's pattern of rows repeats itself after 8.
_FEWEST_PAGE_TOKENS = 8


def paged_attention(
    q: torch.Tensor,
    kv_pages: KvPages,
    plan: AttentionPlan | DeviceAttentionPlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `moebius_kernels.paged_attention.paged_attention`; a `DeviceAttentionPlan` takes no `softcap`."""
    if isinstance(plan, AttentionPlan):
        return reference.paged_attention(q, kv_pages, plan, scale=scale, softcap=softcap, sinks=sinks)
    assert softcap is None
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    factor = kv_pages.key_dim**-0.5 if scale is None else scale
    decode_attention(q, kv_pages, plan, output, factor, None, sinks)
    prefill_attention(q, kv_pages, plan, output, factor, sinks)
    return output


def _admits(query: Query) -> str | None:
    arguments = query.arguments
    q, pages = arguments["q"], arguments["kv_pages"]
    heads, _ = q.shape
    if query.tokens.last < _FEWEST_TOKENS:
        return f"it is for {_FEWEST_TOKENS} tokens and more"
    if q.dtype != "bfloat16":
        return f"queries in {q.dtype}, it takes bfloat16"
    if reason := pages_refusal(query, _DIMS):
        return reason
    page_size, kv_heads, _ = pages["keys"]["numbers"].shape
    if page_size < _FEWEST_PAGE_TOKENS or page_size & (page_size - 1):
        return f"pages of {page_size} tokens are no power of two from {_FEWEST_PAGE_TOKENS} on"
    if heads > MAX_HEADS or heads % kv_heads:
        return f"{heads} heads, it takes multiples of {kv_heads} up to {MAX_HEADS}"
    if arguments["softcap"] is not None:
        return "scores have a cap"
    return None


BACKENDS = (
    Backend(
        "paged_attention",
        "triton_hopper",
        paged_attention,
        architectures=frozenset({(9, 0)}),
        admits=_admits,
    ),
)
