"""Attention over keys and values that lie in pages."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from moebius_kernels.attention_plan import AttentionPlan, Chunk, DecodeGroup, causal_mask
from moebius_kernels.device_plan import DeviceAttentionPlan
from moebius_kernels.kv_pages import KvPages

# Scores in fp32 that the rows of a chunk may have together, where they are computed explicitly.
MAX_SCORES = 1 << 24
_WITHOUT_PLANS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def write_kv(
    k: torch.Tensor, v: torch.Tensor | None, kv_pages: KvPages, plan: AttentionPlan | DeviceAttentionPlan
) -> torch.Tensor:
    """Puts the rows' keys and values, [T, KV, Dk] and [T, KV, Dv], where `plan.slots` says.

    `v` is None where the values lie in the keys. What is not finite becomes 0: padding multiplies a page's
    leftovers by zero, and zero times NaN would pass one request's fault on to others.

    So the pages hide a fault, from the later rows of its own request too. The result [T] tells of it: 0 for
    a row whose keys and values are finite, else NaN. Add it to what becomes of the row, and check every row.
    """
    slots = plan.slots.long()
    # Zero times NaN, or times infinity, is NaN.
    faults = (k * 0).sum(dim=(1, 2))
    kv_pages.keys.write(_finite(k), slots)
    if kv_pages.values is not None:
        assert v is not None
        faults = faults + (v * 0).sum(dim=(1, 2))
        kv_pages.values.write(_finite(v), slots)
    return faults


def paged_attention(
    q: torch.Tensor,
    kv_pages: KvPages,
    plan: AttentionPlan | DeviceAttentionPlan,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal softmax attention. The rows' own keys and values are in the pages already.

    q [T, heads, Dk], heads a multiple of KV: query head h reads KV head h // (heads / KV). Scores are
    multiplied by `scale`, by default 1 / sqrt(Dk); `softcap` c then makes them c * tanh(score / c). `sinks`
    [heads]: a score that joins the softmax of each row and has no value. The result is [T, heads, Dv] in
    q's dtype; softmax and sums are in fp32.
    """
    if isinstance(plan, DeviceAttentionPlan):
        plan = plan.expanded(q.dtype)
    scores = _Scores(kv_pages.key_dim**-0.5 if scale is None else scale, softcap, sinks)
    # PyTorch's own attention knows no more than that; and where values are of another width than keys, it
    # may copy the keys for each query head.
    plain = softcap is None and sinks is None and kv_pages.value_dim == kv_pages.key_dim
    output = q.new_empty(*q.shape[:2], kv_pages.value_dim)
    for group in plan.decodes:
        decode = _decode if plain and _knows(group.mask) else _explicit_decode
        output.index_copy_(0, group.rows, decode(q.index_select(0, group.rows), kv_pages, group, scores))
    for chunk in plan.chunks:
        prefill = _prefill if plain and _knows(chunk.mask) else _explicit_prefill
        rows = slice(chunk.first_row, chunk.last_row)
        output[rows] = prefill(q[rows], kv_pages, chunk, scores)
    # For a query that is not finite, PyTorch's attention on the CPU gives zeros if there is no mask. That
    # would hide a fault.
    output += (q * 0).sum(dim=-1, keepdim=True)
    return output


@dataclass(frozen=True, slots=True)
class _Scores:
    """How the products of queries and keys become weights."""

    scale: float
    softcap: float | None
    sinks: torch.Tensor | None


def _knows(mask: torch.Tensor | None) -> bool:
    """Whether PyTorch's own attention is right with such a mask. On an H200 the only one of its kernels that
    takes a mask in bf16 has the last row wrong by a third, with 257 rows and 2,738 keys (PyTorch 2.11)."""
    return mask is None or not mask.is_cuda


def _finite(rows: torch.Tensor) -> torch.Tensor:
    return rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def ready_for_any_shape(is_cuda: bool) -> AbstractContextManager[None]:
    """Meanwhile PyTorch's attention on a GPU is not cuDNN's, which it takes first on Hopper: that builds a
    plan for each shape that it has not met, for 0.4 s, and here nearly every call has another one.

    Source: github.com/modelscope/FunASR/issues/3704, with PyTorch 2.11.
    """
    return sdpa_kernel([*_WITHOUT_PLANS]) if is_cuda else nullcontext()


def _decode(q: torch.Tensor, kv_pages: KvPages, group: DecodeGroup, scores: _Scores) -> torch.Tensor:
    keys, values = _gather_group(kv_pages, group, q.dtype)
    # The query heads of a KV head stand where attention has its query positions: none repeats the keys.
    q = q.unflatten(1, (kv_pages.kv_heads, -1))
    with ready_for_any_shape(q.is_cuda):
        output = F.scaled_dot_product_attention(q, keys, values, attn_mask=group.mask, scale=scores.scale)
    return output.flatten(1, 2)


def _prefill(q: torch.Tensor, kv_pages: KvPages, chunk: Chunk, scores: _Scores) -> torch.Tensor:
    keys, values = _gather_chunk(kv_pages, chunk, q.dtype)
    # [KV, shared, rows, D]: KV heads as the batch and their query heads as the heads.
    q = q.unflatten(1, (kv_pages.kv_heads, -1)).permute(1, 2, 0, 3)
    shared = q.shape[1]
    with ready_for_any_shape(q.is_cuda):
        output = F.scaled_dot_product_attention(
            q,
            # Expanding copies no key.
            keys.unsqueeze(1).expand(-1, shared, -1, -1),
            values.unsqueeze(1).expand(-1, shared, -1, -1),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scores.scale,
        )
    return output.permute(2, 0, 1, 3).flatten(1, 2)


def _explicit_decode(q: torch.Tensor, kv_pages: KvPages, group: DecodeGroup, scores: _Scores) -> torch.Tensor:
    keys, values = _gather_group(kv_pages, group, torch.float32)
    rows = q.unflatten(1, (kv_pages.kv_heads, -1)).unsqueeze(3)
    mask = None if group.mask is None else group.mask.unsqueeze(3)
    return _attend(rows, keys, values, mask, scores).flatten(1, 3).to(q.dtype)


def _explicit_prefill(q: torch.Tensor, kv_pages: KvPages, chunk: Chunk, scores: _Scores) -> torch.Tensor:
    keys, values = _gather_chunk(kv_pages, chunk, torch.float32)
    length, heads, _ = q.shape
    output = q.new_empty(length, heads, kv_pages.value_dim)
    # As many rows at a time as memory is meant for; they look at no key that none of them sees.
    tile = max(1, MAX_SCORES // (heads * chunk.num_keys))
    for first in range(0, length, tile):
        last = min(first + tile, length)
        # The keys that belong to the rows themselves.
        own, own_end = chunk.num_keys - length + first, chunk.num_keys - length + last
        oldest = 0 if chunk.window is None else max(0, own - chunk.window + 1)
        if chunk.mask is None:
            mask = causal_mask(own, last - first, own_end, None, torch.float32, q.device)
        else:
            mask = chunk.mask[first:last, oldest:own_end]
        rows = q[first:last].unflatten(1, (kv_pages.kv_heads, -1)).permute(1, 2, 0, 3)
        seen = slice(oldest, own_end)
        attended = _attend(rows[None], keys[None, :, seen], values[None, :, seen], mask, scores)
        output[first:last] = attended[0].permute(2, 0, 1, 3).flatten(1, 2)
    return output


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scores: _Scores
) -> torch.Tensor:
    """q [B, KV, shared, rows, Dk], fp32 keys and values [B, KV, S, D] -> fp32 [B, KV, shared, rows, Dv].

    `mask` is added to the scores [B, KV, shared, rows, S].
    """
    shared = q.shape[2:4]
    logits = (q.float().flatten(2, 3) @ keys.transpose(2, 3)).unflatten(2, shared).mul_(scores.scale)
    if scores.softcap is not None:
        logits = logits.div_(scores.softcap).tanh_().mul_(scores.softcap)
    if mask is not None:
        logits += mask
    largest = logits.amax(dim=-1, keepdim=True)
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(q.shape[1], q.shape[2], 1, 1)
        largest = largest.maximum(sinks)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    if scores.sinks is not None:
        total = total + (sinks - largest).exp()
    return (weights.flatten(2, 3) @ values).unflatten(2, shared) / total


def _gather_group(
    kv_pages: KvPages, group: DecodeGroup, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, KV, num_keys, D] each."""
    keys, values = (
        rows.unflatten(0, (len(group.rows), -1))[:, : group.num_keys].transpose(1, 2)
        for rows in kv_pages.gather(group.pages, dtype)
    )
    return keys, values


def _gather_chunk(kv_pages: KvPages, chunk: Chunk, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[KV, num_keys, D] each."""
    keys, values = (rows[: chunk.num_keys].transpose(0, 1) for rows in kv_pages.gather(chunk.pages, dtype))
    return keys, values
