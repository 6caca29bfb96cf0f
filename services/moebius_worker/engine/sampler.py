"""From logits to tokens."""

from collections.abc import Sequence

import torch

from moebius_worker.engine.draw import draw
from moebius_worker.engine.logit_adjustments import adjust_logits
from moebius_worker.engine.token_masks import mask_logits
from moebius_worker.engine.types import Logprobs, NonFiniteLogitsError, Sampled, SampleRow


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SampleRow], *, with_kernels: bool = True) -> list[Sampled]:
    """Samples logits fp32 [N, vocab] for N rows. A row's result depends on that row alone.

    `with_kernels`: on a GPU, draws are computed there. Raises NonFiniteLogitsError.
    """
    if not rows:
        return []
    adjusted = adjust_logits(logits, rows)
    token_ids = _choose(mask_logits(adjusted, rows), rows, with_kernels)
    logprobs = _logprobs(adjusted, rows, token_ids)
    return [Sampled(token_id, logprobs.get(index)) for index, token_id in enumerate(token_ids)]


def _choose(logits: torch.Tensor, rows: Sequence[SampleRow], with_kernels: bool) -> list[int]:
    """Token ids. Raises NonFiniteLogitsError."""
    random = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if random and logits.is_cuda and with_kernels:
        # Late: a machine without a GPU need not have Triton.
        from moebius_worker.engine.draw_on_device import draw_on_device

        return _finite(*draw_on_device(logits, rows))
    best, best_ids = logits.max(dim=-1)
    token_ids = _finite(best_ids, best)
    if random:
        chosen = logits if len(random) == len(rows) else logits[random]
        params = [rows[index].params for index in random]
        drawn = draw(chosen, params, [len(rows[index].output_ids) for index in random])
        for index, token_id in zip(random, drawn, strict=True):
            token_ids[index] = token_id
    return token_ids


def _finite(token_ids: torch.Tensor, best: torch.Tensor) -> list[int]:
    """The token ids, if the best logit of each row is finite. One copy from the device for both."""
    found: list[int] = torch.where(best.isfinite(), token_ids, -1).tolist()
    if bad := tuple(index for index, token_id in enumerate(found) if token_id < 0):
        raise NonFiniteLogitsError(bad)
    return found


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
