"""What checkpoints mean that declare their activations as FP8: the operations' products with rounded x.

References of backends that multiply so (`Backend.reference`). Against the operations' own references, which
round nothing, a product is off by 2 to 3 %, routed experts by 4 to 5 %; against these by rounding alone.
"""

from collections.abc import Sequence

import torch

from moebius_kernels import experts
from moebius_kernels import linear as exact
from moebius_kernels.activations import SILU, Activation
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.rounded_activations import round_activations
from moebius_kernels.router import Route


def linear(x: torch.Tensor, blocks: Sequence[StoredMatrix], bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `moebius_kernels.linear.linear`, of x rounded. Sums are in fp32, and so is what has to be added."""
    wide = None if bias is None else bias.float()
    return exact.linear(round_activations(x), blocks, wide).to(x.dtype)


def routed_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, activation: Activation = SILU
) -> torch.Tensor:
    """As `moebius_kernels.experts.routed_experts`, of x rounded, and of what is between the products.

    That is fp32 before it is rounded: a rounding to bf16 first would move 1 of 50 codes to its neighbour.
    """
    return experts.weighted_sum(x.float(), route, weights, activation, linear).to(x.dtype)
