"""What the safetensors files of a directory hold, from their headers alone."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """All tensors by name: of one file, or of the shards of an index; file by file, each from front to back.

    Raises CheckpointError for files that are missing, damaged or not what the index says.
    """
    tensors: dict[str, TensorInfo] = {}
    files, indexed = _files(directory)
    for file in files:
        for name, info in _header(file).items():
            if name in tensors:
                raise CheckpointError(f"{name} is both in {tensors[name].file} and in {file}.")
            tensors[name] = info
    for name, file in indexed.items():
        if name not in tensors or tensors[name].file != str(file):
            raise CheckpointError(f"The index of {directory} says that {file} holds {name}, but it does not.")
    return tensors


def _files(directory: Path) -> tuple[list[Path], Mapping[str, Path]]:
    """The files to read, and where the index, if there is one, says each tensor is."""
    indices = _own(directory, "*.safetensors.index.json")
    if indices:
        try:
            weight_map = json.loads(indices[0].read_bytes())["weight_map"]
            indexed = {str(name): directory / file for name, file in weight_map.items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{indices[0]} is no index of safetensors files: {error!r}") from error
        files = sorted(set(indexed.values()))
        if elsewhere := [str(file) for file in files if file.parent != directory]:
            raise CheckpointError(
                f"{indices[0]} names {', '.join(elsewhere)}, which is not next to it, where weights are."
            )
        if missing := [file.name for file in files if not file.is_file()]:
            raise CheckpointError(
                f"{directory} lacks {', '.join(missing)}, which {indices[0].name} names: download the rest."
            )
        return files, indexed
    files = _own(directory, "*.safetensors")
    if not files:
        pickled = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
        hint = " Pickled weights are not read: convert them with `save_pretrained` of transformers."
        raise CheckpointError(f"{directory} has no *.safetensors files.{hint if pickled else ''}")
    return files, {}


def _own(directory: Path, pattern: str) -> list[Path]:
    """Without `consolidated` files, which repeat the weights in the layout of their authors."""
    return sorted(file for file in directory.glob(pattern) if not file.name.startswith("consolidated"))


def _header(file: Path) -> dict[str, TensorInfo]:
    """Names, dtypes and sizes, in the order of the file."""
    try:
        stream = file.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
    try:
        with stream:
            with safe_open(str(file), framework="np"):
                pass  # checks that the header is sound and that its tensors cover the file exactly
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is truncated or damaged: {error}. Download it again.") from error
    header.pop("__metadata__", None)
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    return {
        name: TensorInfo(
            tuple(entry["shape"]),
            entry["dtype"],
            str(file),
            entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries
    }
