"""Tensors as a reader offers them, from memory or from a file of safetensors."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from moebius_kernels.formats.format import StoredMatrix
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.weights.scheme import Scheme, StoredForm
from moebius_worker.engine.weights.schemes.registry import scheme_of

CHECKPOINTS = Path(__file__).parents[3] / "data" / "checkpoints"
FILE = "model.safetensors"

_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def infos(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(tuple(tensor.shape), _NAMES[tensor.dtype], FILE, tensor.nbytes)
        for name, tensor in tensors.items()
    }


def checkpoint(quantization: Mapping[str, Any] | None, container: Any = "safetensors") -> Checkpoint:
    config = {"quantization_config": quantization} if quantization else {}
    return Checkpoint(Path("somewhere"), container, config, {}, "name")


def scheme(quantization: Mapping[str, Any] | None) -> Scheme:
    return scheme_of(checkpoint(quantization))


def form(
    quantization: Mapping[str, Any] | None, tensors: Mapping[str, torch.Tensor], module: str = "m"
) -> StoredForm:
    return scheme(quantization).form(f"{module}.weight", infos(tensors))


def stored(
    quantization: Mapping[str, Any] | None, tensors: Mapping[str, torch.Tensor], module: str = "m"
) -> StoredMatrix:
    matrix = form(quantization, tensors, module).read(tensors.__getitem__)
    fits(matrix)
    return matrix


def fits(matrix: StoredMatrix) -> None:
    """The components are what memory is allocated for."""
    empty = StoredMatrix.empty(matrix.format, matrix.shape, torch.device("cpu"))
    assert matrix.parts.keys() == empty.parts.keys()
    empty.copy_(matrix)
    for name, part in matrix.parts.items():
        assert part.dtype == empty.parts[name].dtype
        assert part.shape == empty.parts[name].shape


def vendor(name: str) -> SimpleNamespace:
    """A checkpoint of tests/data: its scheme, and its tensors as torch and, by numpy alone, as they are."""
    directory = CHECKPOINTS / name
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / FILE)
    return SimpleNamespace(
        config=config,
        scheme=scheme_of(Checkpoint(directory, "safetensors", config, {}, name)),
        tensors=tensors,
        infos=infos(tensors),
        raw=_raw(directory / FILE),
    )


def _raw(path: Path) -> dict[str, np.ndarray]:
    """Floating-point numbers as fp32, FP8 as its codes, integers as they are."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    dtypes = {
        "BF16": "<u2",
        "F16": "<f2",
        "F32": "<f4",
        "F8_E4M3": "u1",
        "U8": "u1",
        "I32": "<i4",
        "I64": "<i8",
    }
    arrays = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[start:stop], dtypes[entry["dtype"]]).reshape(entry["shape"])
        if entry["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = array.astype(np.float32) if entry["dtype"] == "F16" else array
    return arrays
