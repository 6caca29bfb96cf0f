"""GGUF's tensors under Hugging Face's names, as they are stored: blocks stay blocks."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.errors import CheckpointError, understanding
from moebius_worker.checkpoint.gguf.families import find_family
from moebius_worker.checkpoint.gguf.family import Family, Join, Named, Part, left_out, named
from moebius_worker.checkpoint.gguf.file import GgufTensor, read_gguf
from moebius_worker.checkpoint.gguf.order import OrderError
from moebius_worker.checkpoint.tensor_info import TensorInfo

_PLAIN = {
    Type.F32: torch.float32,
    Type.F16: torch.float16,
    Type.BF16: torch.bfloat16,
    Type.F64: torch.float64,
    Type.I8: torch.int8,
    Type.I16: torch.int16,
    Type.I32: torch.int32,
    Type.I64: torch.int64,
}


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor of the model comes from: what of a stored one, whole or one expert's."""

    stored: GgufTensor
    part: Part
    expert: int | None
    # Not to be had in its stored form, since its values or its blocks are others.
    decoded: bool


@dataclass(frozen=True, slots=True)
class _Joined:
    join: Join
    stored: tuple[GgufTensor, ...]


class GgufReader:
    """The tensors of a GGUF model, with rows and values as Hugging Face has them.

    A tensor [R, C] of a block type is told with this shape and the type's name ("Q4_K"), and read as uint8
    [R, bytes a row]. All others are read as they are told: plain types, and what has to be decoded, as "F32".
    Beside "NAME.weight" there may be "NAME.scale", F32 [1], a factor of the whole weight (NVFP4).
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        gguf = read_gguf(checkpoint.path)
        self.tensors: dict[str, TensorInfo] = {}
        self._config, self._family = checkpoint.config, find_family(gguf)
        self._sources: dict[str, _Source | _Joined] = {}
        self._files: dict[Path, np.ndarray] = {}
        joins: dict[str, tuple[Join, dict[str, GgufTensor]]] = {}
        for stored in sorted(gguf.tensors.values(), key=lambda tensor: (tensor.file, tensor.offset)):
            if left_out(stored.name, self._config["num_hidden_layers"]):
                continue
            if (found := _join_of(self._family, stored.name)) is not None:
                name, join, role = found
                members = joins.setdefault(name, (join, {}))[1]
                members[role] = stored
                if len(members) == len(join.of):
                    self._add_join(name, join, tuple(members[role] for role in join.of))
                continue
            names = named(self._family, stored.name)
            if not names:
                raise CheckpointError(
                    f"Tensor {stored.name} {list(stored.shape)} in {stored.file} belongs to no "
                    f"{self._family.class_name} as it is supported here."
                )
            for each in names:
                self._add(stored, each)
        for name, (join, members) in joins.items():
            if missing := [role for role in join.of if role not in members]:
                stored = next(iter(members.values()))
                raise CheckpointError(f"{stored.file} has {stored.name}, but no {missing[0]} to make {name}.")

    def read(self, name: str) -> torch.Tensor:
        """The tensor, which may be a view of the mapped file: not to be kept or changed.

        Raises CheckpointError with tensor and file where the file has shrunk, and with the type where the
        tensor must be decoded and cannot be.
        """
        source = self._sources[name]
        if isinstance(source, _Joined):
            arrays = [self._decode(stored, None) for stored in source.stored]
            return _tensor(source.join.make(*arrays))
        if source.stored.type in _PLAIN and source.part.values is None:
            return self._plain(source)
        if source.decoded:
            return _tensor(self._changed(source, self._decode(source.stored, source.expert)))
        return _tensor(self._blocks(source))

    def _add(self, stored: GgufTensor, each: Named) -> None:
        part, stacked = each.part, "{expert}" in each.name
        shape, experts = (stored.shape[1:], stored.shape[0]) if stacked else (stored.shape, 1)
        if stored.name.endswith(".scale") and each.name.endswith(".scale"):
            # One factor of whatever rows the weight has.
            part, shape = Part(part.name), shape or (1,)
        if not shape:
            raise CheckpointError(f"Tensor {stored.name} {list(stored.shape)} in {stored.file} is no vector.")
        try:
            decoded = _is_decoded(self._config, stored, part, shape)
            final = self._changed_shape(part, shape)
        except OrderError as error:
            raise CheckpointError(f"Tensor {stored.name} in {stored.file}: {error}.") from error
        nbytes = stored.nbytes // experts * math.prod(final) // max(math.prod(shape), 1)
        for expert in range(experts):
            dtype = "F32" if decoded else stored.type.name
            self._put(
                each.name.format(expert=expert),
                _Source(stored, part, expert if stacked else None, decoded),
                TensorInfo(final, dtype, str(stored.file), nbytes),
            )

    def _add_join(self, name: str, join: Join, stored: tuple[GgufTensor, ...]) -> None:
        with understanding(f"{name}, made of {', '.join(each.name for each in stored)} in {stored[0].file},"):
            shape = join.shape(*(tensor.shape for tensor in stored))
        nbytes = sum(tensor.nbytes for tensor in stored)
        self._put(name, _Joined(join, stored), TensorInfo(shape, "F32", str(stored[0].file), nbytes))

    def _put(self, name: str, source: _Source | _Joined, info: TensorInfo) -> None:
        if name in self.tensors:
            raise CheckpointError(f"{info.file} has {name} twice, in two forms.")
        self._sources[name], self.tensors[name] = source, info

    def _changed_shape(self, part: Part, shape: tuple[int, ...]) -> tuple[int, ...]:
        if part.rows is not None:
            shape = (len(part.rows(self._config, shape[0])), *shape[1:])
        if part.columns is not None:
            part.columns(self._config, shape[-1])
        if part.values is not None:
            shape = part.values(np.broadcast_to(np.float32(-1), shape)).shape
        return shape

    def _changed(self, source: _Source, array: np.ndarray) -> np.ndarray:
        """An array of numbers in the order and with the values of the model."""
        part = source.part
        if part.rows is not None:
            array = _take(array, part.rows(self._config, array.shape[0]))
        if part.columns is not None:
            array = array[..., part.columns(self._config, array.shape[-1])]
        return array if part.values is None else part.values(array)

    def _plain(self, source: _Source) -> torch.Tensor:
        dtype = _PLAIN[source.stored.type]
        # numpy has no bfloat16, which does not matter to an order.
        shape = source.stored.shape if source.expert is None else source.stored.shape[1:]
        width = np.dtype(f"u{dtype.itemsize}")
        array = self._bytes(source.stored, source.expert).view(width).reshape(shape or (1,))
        return _tensor(self._changed(source, array)).view(dtype)

    def _blocks(self, source: _Source) -> np.ndarray:
        shape = source.stored.shape if source.expert is None else source.stored.shape[1:]
        blocks = self._bytes(source.stored, source.expert).reshape(math.prod(shape[:-1]), -1)
        if source.part.rows is not None:
            blocks = _take(blocks, source.part.rows(self._config, shape[0]))
        if source.part.columns is not None:
            size, nbytes = GGML_QUANT_SIZES[source.stored.type]
            order = source.part.columns(self._config, shape[-1])[::size] // size
            blocks = blocks.reshape(len(blocks), -1, nbytes)[:, order].reshape(len(blocks), -1)
        return blocks

    def _decode(self, stored: GgufTensor, expert: int | None) -> np.ndarray:
        """fp32 in the stored shape and order."""
        shape = stored.shape if expert is None else stored.shape[1:]
        raw = self._bytes(stored, expert)
        if stored.type in _PLAIN:
            return _tensor(raw).view(_PLAIN[stored.type]).float().reshape(shape).numpy()
        return _decode_blocks(raw.reshape(math.prod(shape[:-1]), -1), stored).reshape(shape)

    def _bytes(self, stored: GgufTensor, expert: int | None) -> np.ndarray:
        try:
            if stored.file not in self._files:
                self._files[stored.file] = np.memmap(stored.file, np.uint8, "r")
            size = stored.file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"Cannot read {stored.name} in {stored.file}: {error}") from error
        if size < stored.offset + stored.nbytes:  # to read beyond the end would kill the process
            raise CheckpointError(f"{stored.file} ended within the tensor {stored.name}. Download it again.")
        start, nbytes = stored.offset, stored.nbytes
        if expert is not None:
            nbytes //= stored.shape[0]
            start += expert * nbytes
        return self._files[stored.file][start : start + nbytes]


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor in the array's memory. That of the mapped file cannot be written to, which torch warns of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)


def _decode_blocks(blocks: np.ndarray, stored: GgufTensor) -> np.ndarray:
    """fp32 [R, C] of uint8 [R, bytes a row]. Raises CheckpointError with tensor, type and file."""
    try:
        return dequantize(blocks, stored.type)
    except (NotImplementedError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"Tensor {stored.name} in {stored.file} has type {stored.type.name}, "
            "which the installed `gguf` package cannot decode."
        ) from error


def _join_of(family: Family, name: str) -> tuple[str, Join, str] | None:
    """The name of the tensor that `name` is joined to, how, and as which member."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    for join in family.joins:
        if rest in join.of:
            return f"model.layers.{block}.{join.name}", join, rest
    return None


def _is_decoded(config: Mapping[str, Any], stored: GgufTensor, part: Part, shape: tuple[int, ...]) -> bool:
    if part.values is not None:
        return True
    if stored.type in _PLAIN:
        return False
    size = GGML_QUANT_SIZES[stored.type][0]
    return len(shape) < 2 or (part.columns is not None and not _keeps_blocks(part, config, shape[-1], size))


def _keeps_blocks(part: Part, config: Mapping[str, Any], columns: int, size: int) -> bool:
    """Whether an order of columns moves whole blocks of `size`."""
    assert part.columns is not None
    order = part.columns(config, columns).reshape(-1, size)
    return bool(np.all(order == order[:, :1] + np.arange(size)) and np.all(order[:, 0] % size == 0))


def _take(array: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The rows in this order; a view if they lie one after another."""
    if len(order) and np.array_equal(order, np.arange(order[0], order[0] + len(order))):
        return array[order[0] : order[0] + len(order)]
    return array[order]
