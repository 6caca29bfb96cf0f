"""Weights in GGUF, decoded as they are read: blocks to fp32, llama.cpp's order of rows to Hugging Face's."""

from collections.abc import Mapping

import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.errors import CheckpointError

from .gguf_stored import PLAIN, StoredGguf
from .reader import TensorInfo


class GgufReader:
    """The tensors of a GGUF model, without the factors beside them, which are applied."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.stored = StoredGguf(checkpoint)
        self._scales = {
            name: scale
            for name in self.stored.tensors
            if name.endswith(".weight")
            and (scale := name.removesuffix("weight") + "scale") in self.stored.tensors
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in self.stored.tensors.items() if name not in set(self._scales.values())
        }

    def read(self, name: str) -> torch.Tensor:
        info, tensor = self.tensors[name], self.stored.read(name)
        if (type_ := Type[info.dtype]) not in PLAIN:
            try:
                tensor = torch.from_numpy(dequantize(tensor.numpy(), type_))
            except (NotImplementedError, ValueError, KeyError) as error:
                raise CheckpointError(
                    f"Tensor {name} in {info.file} has type {type_.name}, "
                    "which the installed `gguf` package cannot decode."
                ) from error
        if name in self._scales:
            tensor = tensor * self.stored.read(self._scales[name])
        return tensor
