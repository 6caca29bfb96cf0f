"""What a container's reader offers."""

from collections.abc import Mapping
from typing import Protocol

import torch

from moebius_worker.checkpoint.tensor_info import TensorInfo


class WeightReader(Protocol):
    """The tensors of a checkpoint under Hugging Face's names, file by file, each from front to back."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU in its stored dtype, or decoded to fp32 where it is stored in blocks.

        It may be a view of the mapped file: to be copied, not to be kept or changed. Raises CheckpointError.
        """
        ...
