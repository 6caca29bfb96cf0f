"""What a container's reader offers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as it is stored: `dtype` in the container's words ("BF16", "Q4_K"), `nbytes` in the file."""

    shape: tuple[int, ...]
    dtype: str
    file: str
    nbytes: int


class WeightReader(Protocol):
    """The tensors of a checkpoint under Hugging Face's names, file by file, each from front to back."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in its stored dtype, or decoded to fp32 where it is stored in blocks.

        It may be a view of the mapped file: to be copied, not to be kept or changed. Raises CheckpointError.
        """
        ...
