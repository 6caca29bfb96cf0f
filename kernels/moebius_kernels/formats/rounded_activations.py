"""Activations as checkpoints mean them that declare theirs as FP8, quantised dynamically.

Each token's numbers, in groups of 128 columns, are E4M3 codes times a factor, the group's largest magnitude
over 448. So do DeepSeek's and Qwen's FP8 checkpoints (`activation_scheme: dynamic`) with blocks of weights.
"""

import torch

# Columns with a factor in common; the largest number of E4M3; a group's largest counts as no less than this,
# so that nothing is divided by zero.
GROUP = 128
LARGEST = 448.0
LEAST = 2.0**-100


def round_activations(x: torch.Tensor) -> torch.Tensor:
    """x [..., C] -> fp32 [..., C], the numbers that the codes stand for. C is a multiple of 128."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True).clamp_min(LEAST)
    # By a tensor: on CUDA, PyTorch multiplies by the inverse of a number, which is another rounding.
    factor = largest / torch.full_like(largest, LARGEST)
    return ((groups / factor).to(torch.float8_e4m3fn).float() * factor).flatten(-2)
