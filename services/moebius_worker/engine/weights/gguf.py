"""Weights in GGUF, decoded as they are read: blocks to fp32, llama.cpp's order of rows to Hugging Face's."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf_file import GgufTensor, read_gguf

from .gguf_names import hugging_face_name
from .reader import TensorInfo

_PLAIN = {
    Type.F32: torch.float32,
    Type.F16: torch.float16,
    Type.BF16: torch.bfloat16,
    Type.F64: torch.float64,
}
# Told by the config, or of no use where activations are not quantised.
_CONSUMED = ("rope_freqs.weight",)
_CONSUMED_SUFFIX = ".input_scale"


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor of the model comes from: one of a file, or one expert's part of it."""

    stored: GgufTensor
    expert: int | None
    # Heads whose rows are to be put back into order; 0 for none.
    heads: int


class GgufReader:
    """The tensors of a GGUF model of the architecture `llama`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        gguf = read_gguf(checkpoint.path)
        self.tensors: dict[str, TensorInfo] = {}
        self._sources: dict[str, _Source] = {}
        # The factors that NVFP4 has beside its blocks, by the weight's name: one, or one an expert.
        self._scales: dict[str, GgufTensor] = {}
        for stored in sorted(gguf.tensors.values(), key=lambda tensor: (tensor.file, tensor.offset)):
            weight = stored.name.removesuffix(".scale") + ".weight"
            if stored.name.endswith(".scale") and weight in gguf.tensors:
                self._scales[weight] = stored
            elif stored.name not in _CONSUMED and not stored.name.endswith(_CONSUMED_SUFFIX):
                self._add(stored, checkpoint)

    def read(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        tensor = self._decode(source.stored, source.expert)
        if (scale := self._scales.get(source.stored.name)) is not None:
            factors = self._decode(scale, None).flatten()
            tensor = tensor * (factors[0] if source.expert is None else factors[source.expert])
        return _unrotate(tensor, source.heads) if source.heads else tensor

    def _add(self, stored: GgufTensor, checkpoint: Checkpoint) -> None:
        named = hugging_face_name(stored.name)
        if named is None:
            raise CheckpointError(
                f"Tensor {stored.name} {list(stored.shape)} in {stored.file} belongs to no supported model."
            )
        if not named.stacked:
            heads = checkpoint.config[named.rotated] if named.rotated else 0
            if heads and stored.shape[0] % (2 * heads):
                raise CheckpointError(
                    f"Tensor {stored.name} in {stored.file}: its {stored.shape[0]} rows are no {heads} heads."
                )
            self._add_source(named.name, stored.shape, stored.nbytes, _Source(stored, None, heads))
            return
        experts = stored.shape[0]
        for expert in range(experts):
            name = named.name.format(expert=expert)
            self._add_source(name, stored.shape[1:], stored.nbytes // experts, _Source(stored, expert, 0))

    def _add_source(self, name: str, shape: tuple[int, ...], nbytes: int, source: _Source) -> None:
        self._sources[name] = source
        self.tensors[name] = TensorInfo(shape, source.stored.type.name, str(source.stored.file), nbytes)

    def _decode(self, stored: GgufTensor, expert: int | None) -> torch.Tensor:
        shape, nbytes, offset = stored.shape, stored.nbytes, stored.offset
        if expert is not None:
            nbytes //= shape[0]
            offset += expert * nbytes
            shape = shape[1:]
        try:
            raw = np.fromfile(stored.file, np.uint8, nbytes, offset=offset)
        except OSError as error:
            raise CheckpointError(f"Cannot read {stored.name} in {stored.file}: {error}") from error
        if len(raw) != nbytes:
            raise CheckpointError(f"{stored.file} ended within the tensor {stored.name}. Download it again.")
        if stored.type in _PLAIN:
            return torch.from_numpy(raw).view(_PLAIN[stored.type]).reshape(shape)
        try:
            rows = math.prod(shape[:-1])
            return torch.from_numpy(dequantize(raw.reshape(rows, -1), stored.type)).reshape(shape)
        except (NotImplementedError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"Tensor {stored.name} in {stored.file} has type {stored.type.name}, "
                "which the installed `gguf` package cannot decode."
            ) from error


def _unrotate(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes llama.cpp's order of a head's rows (or bias), which puts the pairs of rotary embedding together.

    llama.cpp: `w.reshape(heads, 2, dim / 2, ...).swapaxes(1, 2)`; here back from there.
    """
    split = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return split.transpose(1, 2).reshape(tensor.shape)
