"""Whether experts were chosen as the reference chooses them: its own, unless rounding decides.

Ranks are sums and softmaxes in fp32, which nobody has to round as the reference does: ranks that are as good
as equal may stand in any order, and so may groups at the edge of those that are kept. An expert is right if
its group may be kept, and if it is as good as the one in its place among the groups that were. Weights are
those that the reference gives to the experts that were chosen, since one of equal rank has another weight.
"""

import math
from typing import Any

import torch

from moebius_kernels.router import Ranking, Route
from moebius_worker.preflight.compare import tensor_difference

# How far two ranks may be from each other and be as good as equal: beside the rank, which is rounded to 24
# bits, and the score in it, which may be off by some units in the last place.
RANK_SLACK = 2.0**-20
# Smaller numbers are 0 to some GPUs.
_SMALLEST = torch.finfo(torch.float32).tiny
# Softmax and sigmoid in fp32, of the same logits.
WEIGHT_LIMIT = 1e-4


def route_difference(result: Any, expected: Route, ranking: Ranking) -> tuple[float, str | None]:
    """The relative error of the weights, and what is wrong, None if nothing is. `ranking`: of the same call,
    by the reference."""
    if not isinstance(result, Route):
        return math.inf, f"a {type(result).__name__} instead of a route"
    if result.experts.shape != expected.experts.shape:
        return math.inf, f"experts {list(result.experts.shape)} instead of {list(expected.experts.shape)}"
    experts, total = result.experts.long(), ranking.ranks.shape[-1]
    if experts.min() < 0 or experts.max() >= total:
        return math.inf, f"experts {int(experts.min())} to {int(experts.max())} of {total}"
    ordered = experts.sort(dim=-1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return math.inf, "an expert twice in one row"
    right = _as_good(experts, ranking)
    if not right.all():
        return math.inf, f"other experts than the best in {int((~right).sum())} of {len(experts)} rows"
    return tensor_difference(result.weights.float(), ranking.weights(experts), WEIGHT_LIMIT)


def _as_good(experts: torch.Tensor, ranking: Ranking) -> torch.Tensor:
    """Whether the experts are as good as the reference's, place by place, a bool for each row."""
    # A sum of score and bias may be smaller than what was rounded for it.
    sizes = ranking.scores.abs() + ranking.ranks.abs()
    slack = (RANK_SLACK * sizes.nan_to_num(posinf=0.0)).clamp_min(_SMALLEST)
    kept, right = _kept_groups(experts, ranking, slack)
    ranks = ranking.within(kept)
    best = ranks.topk(ranking.top_k, dim=-1).values
    return right & ((ranks + slack).gather(-1, experts) >= best).all(dim=-1)


def _kept_groups(
    experts: torch.Tensor, ranking: Ranking, slack: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups that were kept, [T, groups], and whether they may be, [T]: those that must be, and those that an
    expert is from. Which of equal ones was kept besides, and gave none, cannot be seen."""
    taken = torch.zeros(len(experts), ranking.groups, dtype=torch.bool, device=experts.device)
    taken.scatter_(-1, experts // (ranking.ranks.shape[-1] // ranking.groups), True)
    if ranking.top_groups == ranking.groups:
        return torch.ones_like(taken), torch.ones_like(taken[:, 0])
    merits = ranking.merits()
    slack = ranking.judged_by * slack.unflatten(-1, (ranking.groups, -1)).amax(dim=-1)
    last_in, first_out = merits.topk(ranking.top_groups + 1, dim=-1).values[:, -2:].split(1, dim=-1)
    kept = taken | (merits - slack > first_out)
    may = merits + slack >= last_in
    return kept, (may | ~taken).all(dim=-1) & (kept.sum(dim=-1) <= ranking.top_groups)
