"""Whether tokens were drawn as the reference draws them: its own, unless rounding decides.

A draw is the best of the tokens that are kept, each with its logit over temperature plus noise, which is the
same everywhere. So another token than the reference's is wrong, but for two cases: sums that are as good as
equal, and tokens at the edge of what top-p keeps, for which a sum of thousands of probabilities decides. A
token is right if it may be kept, and nothing that must be kept is better than it.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from moebius_kernels.sampling import Drawn, Draws, floors, gumbel, scaled_logits
from moebius_worker.preflight.compare import tensor_difference

# How far two sums may be from each other and be as good as equal: beside 1, or the logit over temperature. Of
# the latter fp32 has 24 bits.
SUM_SLACK = 2.0**-21
# The part of the mass that may be taken for more or less than it is.
MASS_SLACK = 1e-5


def draw_difference(
    result: Any, expected: Drawn, logits: torch.Tensor, draws: Draws
) -> tuple[float, str | None]:
    """The part of the rows that have other tokens than the reference's, and what is wrong, None if nothing
    is. Rows whose largest logit is not finite may have any token that there is."""
    if not isinstance(result, Drawn):
        return math.inf, f"a {type(result).__name__} instead of drawn tokens"
    # The largest of numbers is one of them: nothing is rounded.
    error, wrong = tensor_difference(result.best, expected.best, 0.0)
    if wrong is not None:
        return error, f"largest logits: {wrong}"
    found, wanted = result.token_ids, expected.token_ids
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return math.inf, f"tokens {found.dtype}{list(found.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    if ((found < 0) | (found >= logits.shape[1])).any():
        return math.inf, f"tokens {int(found.min())} to {int(found.max())} of {logits.shape[1]}"
    others = ((found != wanted) & expected.best.isfinite()).nonzero().squeeze(1)
    if len(others) == 0:
        return 0.0, None
    right = _as_good(logits[others], draws.of(others), found[others])
    error = len(others) / len(found)
    if right.all():
        return error, None
    row = int(others[~right][0])
    wrong = f"token {int(found[row])} instead of {int(wanted[row])} in row {row}"
    return error, f"{wrong}, other tokens in {int((~right).sum())} of {len(found)} rows"


def _as_good(logits: torch.Tensor, draws: Draws, found: torch.Tensor) -> torch.Tensor:
    """Whether the tokens are as good as the reference's, a bool for each row."""
    scaled = scaled_logits(logits, draws)
    sums = gumbel(draws, logits.shape[1]) + scaled
    slack = SUM_SLACK * scaled.abs().nan_to_num(posinf=0.0).clamp_min(1.0)

    def kept(change: float) -> torch.Tensor:
        """If the mass that top-p asks for were another."""
        top_p = torch.where(draws.top_p < 1, draws.top_p + change, draws.top_p).clamp_min(0.0)
        return scaled >= floors(scaled, replace(draws, top_p=top_p)).unsqueeze(1)

    must, may = kept(-MASS_SLACK), kept(MASS_SLACK)
    best = (sums - slack).masked_fill(~must, float("-inf")).amax(dim=-1)
    at = found.unsqueeze(1)
    mine = (sums + slack).masked_fill(~may, float("-inf")).gather(1, at).squeeze(1)
    # With temperature 0 nothing is rounded, and of equals the first is taken.
    return (mine >= best) & mine.isfinite() & (draws.temperature > 0)
