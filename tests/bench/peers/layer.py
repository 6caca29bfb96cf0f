"""The layer of routed experts that all peers compute, in the forms that files have."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moebius_kernels.activations import SILU, Activation, ClampedSwiglu
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.format import Format, StoredMatrix
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.pack import pack
from moebius_kernels.formats.random_matrix import random_matrix
from moebius_kernels.router import Route

# From the layer's input and route to its output, with one of several sets of weights.
Experts = Callable[[torch.Tensor, Route, int], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: Activation = SILU
    bias: bool = False


SHAPES = {
    "qwen3": Shape(128, 8, 2048, 768),
    "qwen3.6": Shape(256, 8, 2048, 512),
    "flash": Shape(512, 10, 2560, 640),
    "gemma": Shape(128, 8, 2816, 704),
    "gpt-oss": Shape(32, 4, 2880, 2880, ClampedSwiglu(), bias=True),
}


def random_layer(form: Format, shape: Shape, device: torch.device) -> ExpertWeights:
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> StoredMatrix:
        found = random_matrix(form, (shape.experts, rows, columns), generator)
        if isinstance(form, Nvfp4):
            # One second factor a matrix, as checkpoints have it.
            found.parts["row_scale"].fill_(columns**-0.5 / 250)
        return found

    def bias(rows: int) -> torch.Tensor | None:
        if not shape.bias:
            return None
        return torch.randn(shape.experts, rows, generator=generator, device=device).bfloat16() / 8

    gate_up, down = matrix(2 * shape.inner, shape.hidden), matrix(shape.hidden, shape.inner)
    return ExpertWeights([gate_up], down, bias(2 * shape.inner), bias(shape.hidden))


def wide(layer: ExpertWeights) -> ExpertWeights:
    """In fp32, as the reference computes."""

    def expanded(matrix: StoredMatrix) -> StoredMatrix:
        return StoredMatrix(Dense(torch.float32), matrix.shape, {"data": matrix.dequantize()})

    biases = (None if bias is None else bias.float() for bias in (layer.gate_up_bias, layer.down_bias))
    return ExpertWeights([expanded(layer.gate_up[0])], expanded(layer.down), *biases)


def packed(layer: ExpertWeights) -> ExpertWeights:
    """As our kernels read it."""
    return ExpertWeights([pack(layer.gate_up[0])], pack(layer.down), layer.gate_up_bias, layer.down_bias)
