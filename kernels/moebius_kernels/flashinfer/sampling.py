"""Draws whose candidates FlashInfer selects: all the rest is ours, and what is drawn the same.

Its own samplers have a generator of their own, where a draw here is a function of (seed, position) alone: a
request that is moved could not go on with its tokens. What takes the time is the selection of the best of a
hundred thousand logits, in which there is nothing random.
"""

import torch

from moebius_kernels.flashinfer.admission import SUPPORTED, draw_refusal
from moebius_kernels.flashinfer.package import not_compiled, required
from moebius_kernels.registry import Backend, Query
from moebius_kernels.sampling import Drawn, Draws
from moebius_kernels.triton.sampling import draw_among

required()


def draw_tokens(logits: torch.Tensor, draws: Draws) -> Drawn:
    """As `moebius_kernels.sampling.draw_tokens`."""
    return draw_among(logits, draws, _largest)


def _largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row, in descending order: fp32 [N, vocab] -> [N, count]."""
    from flashinfer import top_k

    # Deterministic or not, the values are the same; of up to 2,048 a kernel of its own puts them in order.
    values: torch.Tensor = top_k(logits, count, sorted=True, deterministic=True)[0]
    return values


def _admits(query: Query) -> str | None:
    if reason := draw_refusal(query):
        return reason
    from flashinfer.jit.topk import gen_topk_module

    return not_compiled(gen_topk_module())


BACKENDS = (
    Backend(
        "draw_tokens",
        "flashinfer",
        draw_tokens,
        architectures=SUPPORTED,
        admits=_admits,
    ),
)
