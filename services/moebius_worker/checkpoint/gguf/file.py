"""The header of a GGUF file: metadata and tensor table, without the weights.

The reader of PyPI's `gguf` makes an array of every string, which takes seconds and hundreds of megabytes for
a vocabulary, and it does not say which tensor a truncated file lacks. Types and block sizes come from `gguf`.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from moebius_worker.checkpoint.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. `shape` has the outermost dimension first, as torch has it."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Gguf:
    """A GGUF model: one file, or the shards of one named `...-00001-of-0000N.gguf`."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> Gguf:
    """Reads the header of `path` and, if it is one of a model's shards, of them all.

    Checks that every tensor lies within its file and that no shard and no tensor is missing. Raises
    CheckpointError for what is not GGUF, for truncated files and for types that `gguf` does not know.
    """
    metadata, tensors = _read_file(path)
    count = metadata.get("split.count", 0)
    if not isinstance(count, int):
        raise CheckpointError(f"{path} is damaged: its split.count is {count!r}.")
    if count < 2:
        return Gguf(path, metadata, tensors)
    return _read_shards(path, metadata)


def _read_shards(path: Path, metadata: Mapping[str, Any]) -> Gguf:
    count = metadata["split.count"]
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is one of the {count} shards of a model and has lost its name: it and the others, next "
            f"to it, must be named NAME-00001-of-{count:05d}.gguf and so on."
        )
    shards = [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise CheckpointError(
            f"{path} lacks its other shards {', '.join(missing)} next to it: download them too."
        )
    # The first has the model's metadata.
    metadata, tensors = _read_file(shards[0])
    for number, shard in enumerate(shards):
        theirs, more = (metadata, {}) if number == 0 else _read_file(shard)
        if (theirs.get("split.no"), theirs.get("split.count")) != (number, count):
            raise CheckpointError(
                f"{shard} says that it is shard {theirs.get('split.no')} (from 0) of "
                f"{theirs.get('split.count')}, which is not what its name says. Download it again."
            )
        if twice := tensors.keys() & more.keys():
            name = min(twice)
            raise CheckpointError(f"{name} is both in {tensors[name].file} and in {shard}.")
        tensors |= more
    if len(tensors) != (expected := metadata.get("split.tensors.count", len(tensors))):
        raise CheckpointError(
            f"{shards[0]} says that its {count} shards hold {expected} tensors, but they hold "
            f"{len(tensors)}: they are not of one model. Download them again."
        )
    return Gguf(path, metadata, tensors)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    # ValueError: an empty file cannot be mapped. RecursionError: arrays in arrays, without an end.
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}") from error


class _Header:
    """Reads a file's header from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self.take(4) != b"GGUF":
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with the letters GGUF.")
        version = self.number("I")
        if version not in (2, 3):
            kind = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
            raise CheckpointError(f"{self.path} is {kind} GGUF; little-endian version 2 and 3 can be read.")
        tensor_count, key_count = self.number("Q"), self.number("Q")
        metadata = {self.string(): self.value(self.number("I")) for _ in range(key_count)}
        entries = [self.tensor_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise CheckpointError(f"{self.path} is damaged: its alignment is {alignment!r}.")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise CheckpointError(f"{self.path} holds the tensor {name} twice.")
            tensors[name] = self.locate(name, shape, type_id, start + offset)
        return metadata, tensors

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, count = self.string(), self.number("I")
        dimensions = tuple(self.number("Q") for _ in range(min(count, _MAX_DIMENSIONS)))
        if count > _MAX_DIMENSIONS or math.prod(dimensions, start=count) == 0:
            raise CheckpointError(
                f"{self.path} is damaged: its tensor {name} has {count} dimensions {list(dimensions)}."
            )
        return name, dimensions[::-1], self.number("I"), self.number("Q")

    def locate(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
        try:
            type_ = GGMLQuantizationType(type_id)
        except ValueError as error:
            raise CheckpointError(
                f"Tensor {name} in {self.path} has the type {type_id}, unknown to the package `gguf`."
            ) from error
        block_size, block_bytes = GGML_QUANT_SIZES[type_]
        if shape and shape[-1] % block_size:
            raise CheckpointError(
                f"Tensor {name} in {self.path} is damaged: its rows have {shape[-1]} elements, "
                f"which is no multiple of the {block_size} that a block of {type_.name} holds."
            )
        nbytes = math.prod(shape) // block_size * block_bytes
        if offset + nbytes > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {name} ends at byte {offset + nbytes}, "
                f"but the file has {len(self.data)}. Download it again."
            )
        return GgufTensor(name, shape, type_, self.path, offset, nbytes)

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if self.position + count > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated or damaged: its header wants {count} bytes at byte "
                f"{self.position}, but the file has {len(self.data)}. Download it again."
            )
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        # A vocabulary may hold bytes that are no UTF-8 of themselves; they must not stop the reading.
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.number(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY:
            raise CheckpointError(f"{self.path} is damaged: a metadata value has the unknown type {type_id}.")
        element, count = self.number("I"), self.number("Q")
        if element in _SCALARS:
            size = struct.calcsize(_SCALARS[element])
            return list(struct.unpack(f"<{count}{_SCALARS[element]}", self.take(count * size)))
        return [self.value(element) for _ in range(count)]
