"""Which experts a token goes to."""

from dataclasses import dataclass

import torch

# What DeepSeek-V3 adds to a sum of weights before it divides by it.
_SMALLEST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class Route:
    """For each token its experts, best first: weights fp32 [T, K], experts int64 [T, K].

    Logits that are NaN throughout give weights that are NaN, and any experts, or none, which are -1.
    """

    weights: torch.Tensor
    experts: torch.Tensor


def topk_softmax(
    logits: torch.Tensor,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
) -> Route:
    """Softmax over all experts in fp32, then the top k, renormalised to sum 1 (Mixtral) or not (OLMoE).

    logits [T, E], any float dtype. `scale` multiplies the weights. With `groups` of E / groups experts each,
    side by side, only those of the `top_groups` best can be chosen; a group is as good as its best expert
    (DeepSeek-V2).
    """
    probabilities = logits.float().softmax(dim=-1)
    weights, experts = _of_best_groups(probabilities, groups, top_groups, 1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Route(weights * scale, experts)


def softmax_topk(logits: torch.Tensor, top_k: int) -> Route:
    """The top k logits [T, E], then softmax over these in fp32 (gpt-oss)."""
    chosen, experts = logits.float().topk(top_k, dim=-1)
    return Route(chosen.softmax(dim=-1), experts)


def sigmoid_topk(
    logits: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
) -> Route:
    """Each expert's own sigmoid in fp32 (DeepSeek-V3, GLM-4.x, MiniMax-M2). logits [T, E].

    Experts are chosen by sigmoid + `bias` [E], and weighted by the sigmoid alone, then made to sum 1 if
    `renormalise`, then multiplied by `scale`. With `groups` of E / groups experts each, side by side, only
    those of the `top_groups` best can be chosen; a group is as good as the sum of its best two.
    """
    scores = logits.float().sigmoid()
    ranks = scores if bias is None else scores + bias.float()
    ranks = _of_best_groups(ranks, groups, top_groups, 2)
    experts = ranks.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
    return Route(weights * scale, experts)


def _of_best_groups(ranks: torch.Tensor, groups: int, top_groups: int, judged_by: int) -> torch.Tensor:
    """-inf outside the groups whose best `judged_by` have the highest sums. ranks [T, E]."""
    if top_groups == groups:
        return ranks
    grouped = ranks.unflatten(-1, (groups, -1))
    best = grouped.topk(min(judged_by, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best, dtype=torch.bool)
    kept.scatter_(-1, best.topk(top_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
