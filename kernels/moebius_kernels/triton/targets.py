"""What the Triton backends have in common: where they run, and how they are launched."""

from typing import Any

import torch
from triton.runtime import driver

from moebius_kernels.registry import Architecture

# Tensor cores that multiply bf16, and copies to shared memory that nobody waits for.
ARCHITECTURES: frozenset[Architecture] = frozenset(
    {(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}
)
# Those that know the type e4m3.
FP8_ARCHITECTURES = ARCHITECTURES - {(8, 0), (8, 6)}


def overlapping(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch options of a kernel that may begin while the one before it ends (griddepcontrol, sm_90 on)."""
    able = generation_of(tensor) >= 9
    return {"OVERLAP": able, "launch_pdl": able}


def generation_of(tensor: torch.Tensor) -> int:
    """The first number of the compute capability of its GPU, on "meta" of the one that is compiled for; 0: no
    GPU."""
    if tensor.is_meta:
        return int(driver.active.get_current_target().arch) // 10
    return torch.cuda.get_device_capability(tensor.device)[0] if tensor.is_cuda else 0


# Triton's own `cdiv` and `next_power_of_2` look for constants of kernels first, for 4 us. A step of 48 layers
# that is no replay would call them 1,800 times.


def ceil_div(number: int, size: int) -> int:
    """How many blocks of a size hold so many."""
    return -(-number // size)


def power_of_two(number: int) -> int:
    """The least that is not smaller. Token counts that have it in common have their tilings in common too: a
    preflight tries the ends of each such range."""
    return 1 << max(0, number - 1).bit_length()
