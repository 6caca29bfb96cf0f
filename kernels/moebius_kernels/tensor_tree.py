"""The tensors in a value of tuples, lists, mappings and data classes, such as the arguments of a call."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from moebius_kernels.formats.format import StoredMatrix

# Elements: compilers make other kernels of addresses that are no multiple of 16 bytes.
_ALIGNMENT = 64


def copy_tensors(value: Any) -> Any:
    """The value with each of its tensors replaced by a copy of its own; weights are shared.

    A copy has the strides and the alignment of the original, and NaN between its numbers.
    """
    return map_tensors(value, _copy)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The value's tensors, except those of stored matrices, always in the same order."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, collect)
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The value with `change` applied to its tensors, except those of stored matrices."""
    match value:
        case torch.Tensor():
            return change(value)
        case StoredMatrix() | None | str() | int() | float():
            return value
        case Mapping():
            return {name: map_tensors(item, change) for name, item in value.items()}
        case tuple() | list():
            items = (map_tensors(item, change) for item in value)
            # A named tuple takes its items one by one.
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        case _ if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value,
                **{field.name: map_tensors(getattr(value, field.name), change) for field in fields(value)},
            )
        case _:
            return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() == 0 or 0 in tensor.stride():
        return tensor.clone()
    offset = tensor.storage_offset() % _ALIGNMENT
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.empty(offset + extent, dtype=tensor.dtype, device=tensor.device)
    memory.view(torch.uint8).fill_(255)
    return memory.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor)
