"""The stored tensors of one module."""

from collections.abc import Mapping
from dataclasses import dataclass

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo

# Scales of activations, which only what quantises these needs.
ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale")


@dataclass(frozen=True, slots=True)
class Module:
    """A module, such as "model.layers.0.mlp.down_proj", among all `tensors` of its checkpoint."""

    name: str
    tensors: Mapping[str, TensorInfo]

    def tensor_name(self, suffix: str) -> str:
        return f"{self.name}.{suffix}"

    def find(self, suffix: str) -> TensorInfo | None:
        return self.tensors.get(self.tensor_name(suffix))

    def present(self, *suffixes: str) -> tuple[str, ...]:
        """The full names of those tensors that are there."""
        return tuple(name for name in map(self.tensor_name, suffixes) if name in self.tensors)

    def need(self, suffix: str, layout: str, dtypes: str, shape: tuple[int | None, ...]) -> TensorInfo:
        """The tensor, held against what the layout wants: `dtypes` separated by spaces, None for any size.

        Raises CheckpointError with the names, shapes and files.
        """
        name, info = self.tensor_name(suffix), self.find(suffix)
        if info is None:
            raise CheckpointError(f"{name}, which {layout} needs, is not in {self.files()}.")
        fits = len(info.shape) == len(shape) and all(
            wanted in (None, size) for size, wanted in zip(info.shape, shape, strict=True)
        )
        if info.dtype not in dtypes.split() or not fits:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)} in {info.file}, "
                f"where {layout} has {dtypes.replace(' ', ' or ')} [{sizes}]."
            )
        return info

    def files(self) -> str:
        """The files that hold the module's tensors or, if there are none, all of the checkpoint."""
        own = {info.file for name, info in self.tensors.items() if name.startswith(f"{self.name}.")}
        return ", ".join(sorted(own or {info.file for info in self.tensors.values()})) or "the checkpoint"
