"""What a quantisation dialect tells of a weight: its form, its stored tensors, and how to read them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from moebius_kernels.formats.format import Format, StoredMatrix
from moebius_worker.checkpoint.tensor_info import TensorInfo

ReadTensor = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How a weight is stored.

    `shape` is the logical one, [R, C] for a matrix. `sources` are the names of all stored tensors that belong
    to the weight, also of those that are not read, such as the scale of the activations. `parts` makes the
    form's components of the stored tensors.
    """

    format: Format
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    parts: Callable[[ReadTensor], Mapping[str, torch.Tensor]]

    def read(self, read: ReadTensor) -> StoredMatrix:
        """The weight, of the tensors that `read` gives by name. It may share their memory.

        Raises CheckpointError for contents that the form cannot hold.
        """
        return StoredMatrix(self.format, self.shape, self.parts(read))


class Scheme(Protocol):
    """A quantisation dialect, as one checkpoint's config declares it."""

    @property
    def name(self) -> str:
        """For people: "modelopt NVFP4", "awq 4-bit", "not quantised"."""
        ...

    def form(self, weight: str, tensors: Mapping[str, TensorInfo]) -> StoredForm:
        """How the parameter `weight`, such as "model.layers.0.mlp.down_proj.weight", is stored.

        `tensors` are the checkpoint's, under canonical names. Nothing is read. Raises CheckpointError, with
        tensor and file, where the tensors are not what the config declares.
        """
        ...
