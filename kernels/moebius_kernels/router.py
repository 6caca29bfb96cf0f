"""Which experts a token goes to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

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


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a router chooses by: the `top_k` experts with the highest `ranks` fp32 [T, E], weighted by what
    `weigh` makes of their `scores`: fp32 [T, E], of those chosen [T, K].

    With `groups` of E / groups experts each, side by side, only those of the `top_groups` best can be chosen;
    a group is as good as the sum of its best `judged_by`.
    """

    ranks: torch.Tensor
    scores: torch.Tensor
    weigh: Callable[[torch.Tensor], torch.Tensor]
    top_k: int
    groups: int = 1
    top_groups: int = 1
    judged_by: int = 1

    def route(self) -> Route:
        ranks = self.ranks
        if self.top_groups < self.groups:
            merits = self.merits()
            best = merits.topk(self.top_groups, dim=-1).indices
            ranks = self.within(torch.zeros_like(merits, dtype=torch.bool).scatter_(-1, best, True))
        experts = ranks.topk(self.top_k, dim=-1).indices
        return Route(self.weights(experts), experts)

    def weights(self, experts: torch.Tensor) -> torch.Tensor:
        """Of the experts [T, K], were they chosen."""
        return self.weigh(self.scores.gather(-1, experts))

    def merits(self) -> torch.Tensor:
        """How good the groups are, [T, groups]."""
        grouped = self.ranks.unflatten(-1, (self.groups, -1))
        return grouped.topk(min(self.judged_by, grouped.shape[-1]), dim=-1).values.sum(dim=-1)

    def within(self, kept: torch.Tensor) -> torch.Tensor:
        """The ranks, -inf outside the groups that are kept: bool [T, groups]."""
        grouped = self.ranks.unflatten(-1, (self.groups, -1))
        return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)


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
    return _softmax(
        logits, top_k, groups=groups, top_groups=top_groups, renormalise=renormalise, scale=scale
    ).route()


def softmax_topk(logits: torch.Tensor, top_k: int) -> Route:
    """The top k logits [T, E], then softmax over these in fp32 (gpt-oss)."""
    return _logits(logits, top_k).route()


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
    return _sigmoid(
        logits, top_k, bias=bias, groups=groups, top_groups=top_groups, renormalise=renormalise, scale=scale
    ).route()


def _softmax(
    logits: torch.Tensor, top_k: int, *, groups: int, top_groups: int, renormalise: bool, scale: float
) -> Ranking:
    scores = logits.float().softmax(dim=-1)
    weigh = partial(_weigh, renormalise=renormalise, smallest=0.0, scale=scale)
    return Ranking(scores, scores, weigh, top_k, groups, top_groups, judged_by=1)


def _logits(logits: torch.Tensor, top_k: int) -> Ranking:
    scores = logits.float()
    return Ranking(scores, scores, partial(torch.softmax, dim=-1), top_k)


def _sigmoid(
    logits: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
) -> Ranking:
    scores = logits.float().sigmoid()
    ranks = scores if bias is None else scores + bias.float()
    weigh = partial(_weigh, renormalise=renormalise, smallest=_SMALLEST_SUM, scale=scale)
    return Ranking(ranks, scores, weigh, top_k, groups, top_groups, judged_by=2)


def _weigh(scores: torch.Tensor, *, renormalise: bool, smallest: float, scale: float) -> torch.Tensor:
    if renormalise:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + smallest)
    return scores * scale


# By the operation, of its arguments, all of which are given.
RANKINGS: Mapping[str, Callable[..., Ranking]] = MappingProxyType(
    {"topk_softmax": _softmax, "softmax_topk": _logits, "sigmoid_topk": _sigmoid}
)
