"""Floating-point numbers as they are."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.format import Component, StoredMatrix

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Dense:
    """One component, `data` [R, C]."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return _NAMES[self.dtype]

    @property
    def components(self) -> Mapping[str, Component]:
        return {"data": Component(self.dtype)}

    @property
    def column_block(self) -> int:
        return 1

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        return parts["data"].float()


def dense(matrix: torch.Tensor) -> StoredMatrix:
    """A tensor [..., R, C] as a stored matrix, sharing its memory."""
    return StoredMatrix(Dense(matrix.dtype), tuple(matrix.shape), {"data": matrix})
