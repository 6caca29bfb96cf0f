"""Attention over keys and values that lie in pages."""

import torch
import torch.nn.functional as F

from moebius_kernels.attention_plan import AttentionPlan, Chunk, DecodeGroup


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Puts the rows' keys and values, [T, KV, D] each, where `plan.slots` says.

    k_pages and v_pages [pages, page_size, KV, D], the dtype of k and v. What is not finite becomes 0: padding
    multiplies a page's leftovers by zero, and zero times NaN would pass one request's fault on to others.

    So the pages hide a fault, from the later rows of its own request too. The result [T] tells of it: 0 for
    a row whose keys and values are finite, else NaN. Add it to what becomes of the row, and check every row.
    """
    for rows, pages in ((k, k_pages), (v, v_pages)):
        finite = rows.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        pages.view(-1, *rows.shape[1:]).index_copy_(0, plan.slots, finite)
    # Zero times NaN, or times infinity, is NaN.
    return (k * 0).sum(dim=(1, 2)) + (v * 0).sum(dim=(1, 2))


def paged_attention(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    """Causal softmax attention, scale 1 / sqrt(D). The rows' own keys and values are in the pages already.

    q [T, heads, D], heads a multiple of KV: query head h reads KV head h // (heads / KV). k_pages and
    v_pages [pages, page_size, KV, D]. The result is [T, heads, D]; softmax and sums are in fp32.
    """
    output = torch.empty_like(q)
    for group in plan.decodes:
        output.index_copy_(0, group.rows, _decode(q.index_select(0, group.rows), k_pages, v_pages, group))
    for chunk in plan.chunks:
        rows = slice(chunk.first_row, chunk.last_row)
        output[rows] = _prefill(q[rows], k_pages, v_pages, chunk)
    return output


def _decode(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, group: DecodeGroup
) -> torch.Tensor:
    batch, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]

    def gather(pages: torch.Tensor) -> torch.Tensor:
        rows = pages.index_select(0, group.pages).view(batch, -1, kv_heads, head_dim)
        return rows[:, : group.num_keys].transpose(1, 2)

    # The query heads of a KV head stand where attention has its query positions: none repeats the keys.
    output = F.scaled_dot_product_attention(
        q.view(batch, kv_heads, -1, head_dim), gather(k_pages), gather(v_pages), attn_mask=group.mask
    )
    return output.reshape(batch, heads, head_dim)


def _prefill(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    length, heads, head_dim = q.shape
    kv_heads = k_pages.shape[2]
    shared = heads // kv_heads

    def gather(pages: torch.Tensor) -> torch.Tensor:
        rows = pages.index_select(0, chunk.pages).view(-1, kv_heads, head_dim)[: chunk.num_keys]
        return rows.transpose(0, 1).unsqueeze(1).expand(-1, shared, -1, -1)

    # KV heads as the batch and their query heads as the heads: expanding copies no key.
    output = F.scaled_dot_product_attention(
        q.view(length, kv_heads, shared, head_dim).permute(1, 2, 0, 3),
        gather(k_pages),
        gather(v_pages),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
    )
    return output.permute(2, 0, 1, 3).reshape(length, heads, head_dim)
