"""Tensors in floating point."""

from collections.abc import Mapping

import torch

from moebius_kernels.formats.dense import Dense
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.weights.scheme import StoredForm

# By the containers' names: safetensors and GGUF have the same ones.
FLOATING = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# What factors of quantised weights are stored in.
SCALES = " ".join(FLOATING)


def plain_form(name: str, tensors: Mapping[str, TensorInfo]) -> StoredForm:
    """The form of a tensor of any shape that is not quantised. Raises CheckpointError for all others."""
    info = tensors.get(name)
    if info is None:
        files = ", ".join(sorted({info.file for info in tensors.values()})) or "the checkpoint"
        raise CheckpointError(f"{name} is not in {files}.")
    if info.dtype not in FLOATING:
        raise CheckpointError(
            f"{name} is {info.dtype} {list(info.shape)} in {info.file}, but the config declares no "
            f"quantisation of it; floating-point numbers are {', '.join(FLOATING)}."
        )
    return StoredForm(Dense(FLOATING[info.dtype]), info.shape, (name,), lambda read: {"data": read(name)})
