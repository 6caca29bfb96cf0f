"""Which experts a token goes to."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Route:
    """For each token its experts, best first: weights fp32 [T, K], experts int64 [T, K]."""

    weights: torch.Tensor
    experts: torch.Tensor


def topk_softmax(logits: torch.Tensor, top_k: int) -> Route:
    """Softmax over all experts in fp32, then the top k, renormalised to sum 1 (Mixtral's router).

    logits [T, E], any float dtype.
    """
    weights, experts = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    return Route(weights / weights.sum(dim=-1, keepdim=True), experts)
