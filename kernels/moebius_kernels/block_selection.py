"""Sparse attention by blocks: each row sees the blocks of keys whose averages suit it best, and its own."""

from collections.abc import Callable
from dataclasses import replace

import torch

from moebius_kernels.attention_plan import AttentionPlan, Chunk, DecodeGroup, additive_mask
from moebius_kernels.device_plan import DeviceAttentionPlan
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.paged_attention import MAX_SCORES


def select_blocks(
    q: torch.Tensor,
    positions: torch.Tensor,
    index_pages: KvPages,
    plan: AttentionPlan | DeviceAttentionPlan,
    *,
    block: int,
    top: int,
    finish: Callable[[torch.Tensor], torch.Tensor],
) -> AttentionPlan:
    """`plan`, a plan without a window, with masks that leave each row the keys that it selects.

    A row at position p chooses among the (p + 1) // block whole blocks of keys up to it: the `top` with the
    largest sum over heads of relu(q . key of the block), of equals the older; it also sees the keys after
    those blocks. q [T, heads, D]; positions int64 [T]; `index_pages`: a key [1, D] of each position, which is
    there for the rows of this step too. `finish` makes the keys of blocks 0, 1, ... from the averages
    [..., blocks, D] of theirs. Scores are in fp32.
    """

    def selected(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor | None:
        """Rows int64 [R] and keys [S, D], or [R, S, D] -> an additive mask [R, S]; None if all see all."""
        num_keys = keys.shape[-2]
        whole = num_keys // block
        if whole <= top:
            return None
        averages = keys[..., : whole * block, :].unflatten(-2, (whole, block)).float().mean(dim=-2)
        scores = _scores(q.index_select(0, rows).float(), finish(averages.to(keys.dtype)).float())
        visible = _visible(scores, positions.index_select(0, rows), num_keys, block, top)
        return additive_mask(visible, q.dtype)

    def decode(group: DecodeGroup) -> DecodeGroup:
        keys = index_pages.keys.gather(group.pages, q.dtype).squeeze(1)
        mask = selected(group.rows, keys.unflatten(0, (len(group.rows), -1))[:, : group.num_keys])
        return group if mask is None else replace(group, mask=mask[:, None, None, :])

    def prefill(chunk: Chunk) -> Chunk:
        keys = index_pages.keys.gather(chunk.pages, q.dtype).squeeze(1)[: chunk.num_keys]
        mask = selected(torch.arange(chunk.first_row, chunk.last_row, device=q.device), keys)
        return chunk if mask is None else replace(chunk, mask=mask)

    if isinstance(plan, DeviceAttentionPlan):
        plan = plan.expanded(q.dtype)
    return replace(
        plan,
        decodes=tuple(decode(group) for group in plan.decodes),
        chunks=tuple(prefill(chunk) for chunk in plan.chunks),
    )


def _scores(q: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """q [R, heads, D] and blocks [B, D], or [R, B, D] -> [R, B]; some rows at a time, for their memory."""
    tile = max(1, MAX_SCORES // (q.shape[1] * blocks.shape[-2]))
    shared = blocks.dim() == 2
    return torch.cat(
        [
            (q[first : first + tile] @ (blocks if shared else blocks[first : first + tile]).mT)
            .relu_()
            .sum(dim=1)
            for first in range(0, len(q), tile)
        ]
    )


def _visible(
    scores: torch.Tensor, positions: torch.Tensor, num_keys: int, block: int, top: int
) -> torch.Tensor:
    """scores [R, B] of the blocks and positions [R] -> which keys a row sees, [R, num_keys]."""
    number = torch.arange(scores.shape[1] + 1, device=scores.device)
    unfinished = number >= ((positions + 1) // block).unsqueeze(1)
    scores = scores.masked_fill(unfinished[:, :-1], float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    chosen = unfinished.scatter(1, best, True)
    key = torch.arange(num_keys, device=scores.device)
    return chosen[:, key // block] & (key <= positions.unsqueeze(1))
