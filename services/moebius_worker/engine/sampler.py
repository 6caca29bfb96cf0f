"""From logits to tokens."""

from collections.abc import Sequence

import torch

from moebius_kernels.operations import REFERENCE, Draw
from moebius_worker.engine.drawing import draws_of
from moebius_worker.engine.logit_adjustments import adjust_logits
from moebius_worker.engine.token_masks import mask_logits
from moebius_worker.engine.types import Logprobs, NonFiniteLogitsError, Sampled, SampleRow


@torch.inference_mode()
def sample(
    logits: torch.Tensor, rows: Sequence[SampleRow], *, draw_tokens: Draw = REFERENCE.draw_tokens
) -> list[Sampled]:
    """Samples logits fp32 [N, vocab] for N rows. A row's result depends on that row alone.

    `draw_tokens`: what computes that operation. Raises NonFiniteLogitsError.
    """
    if not rows:
        return []
    adjusted = adjust_logits(logits, rows)
    token_ids: list[int] = choose(mask_logits(adjusted, rows), rows, draw_tokens=draw_tokens).tolist()
    if bad := tuple(index for index, token_id in enumerate(token_ids) if token_id < 0):
        raise NonFiniteLogitsError(bad)
    logprobs = _logprobs(adjusted, rows, token_ids)
    return [Sampled(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]


@torch.inference_mode()
def choose(
    logits: torch.Tensor, rows: Sequence[SampleRow], *, draw_tokens: Draw = REFERENCE.draw_tokens
) -> torch.Tensor:
    """Draws from logits fp32 [N, vocab] as they are. Token ids int64 [N], where the logits are; -1 where a
    row's best logit is not finite. Nobody waits for a GPU."""
    if any(row.params.temperature > 0 for row in rows):
        drawn = draw_tokens(logits, draws_of(rows, logits.device))
        token_ids, best = drawn.token_ids, drawn.best
    else:
        best, token_ids = logits.max(dim=-1)
    # One copy from the device will do for both. A difference is not 0 where the number is not finite: fewer
    # kernels than `isfinite` has.
    return token_ids.masked_fill_(best - best != 0, -1)


def _logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int]
) -> dict[int, Logprobs]:
    """Those of the rows that asked, by row."""
    counts = {index: row.params.logprobs for index, row in enumerate(rows) if row.params.logprobs is not None}
    if not counts:
        return {}
    indices = list(counts)
    table = logits[indices].log_softmax(dim=-1)
    width = min(max(counts.values()), table.shape[1])
    top_values, top_ids = table.topk(width, dim=-1)
    chosen = torch.tensor([token_ids[index] for index in indices], device=table.device)
    own = table.gather(1, chosen.unsqueeze(1)).squeeze(1)
    found = zip(counts.items(), own.tolist(), top_ids.tolist(), top_values.tolist(), strict=True)
    return {
        index: Logprobs(logprob, tuple(zip(ids[:count], values[:count], strict=True)))
        for (index, count), logprob, ids, values in found
    }
