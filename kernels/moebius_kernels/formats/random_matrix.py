"""Random matrices in every stored form that the kernels read, with numbers of the size of real weights."""

from collections.abc import Mapping

import torch

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.e2m1_words import E2m1Words
from moebius_kernels.formats.format import Format, StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.int_words import ROW, IntWords
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.pack import pack
from moebius_kernels.formats.planes import Planes


def random_matrix(format: Format, shape: tuple[int, ...], generator: torch.Generator) -> StoredMatrix:
    """Of about unit variance over the square root of its columns."""
    if isinstance(format, E2m1Words):
        return pack(random_matrix(format.base, shape, generator))
    if isinstance(format, IntWords):
        group = None if format.group == ROW else format.group
        return pack(random_matrix(IntGroup(4, group, format.centred, torch.bfloat16), shape, generator))
    matrix = StoredMatrix.empty(format, shape, generator.device)
    scale = shape[-1] ** -0.5
    for part in matrix.parts.values():
        if part.dtype == torch.uint8:
            part.random_(0, 256, generator=generator)
        else:
            part.copy_(_uniform(part.shape, generator))
    parts = matrix.parts
    match format:
        case Dense():
            parts["data"].copy_(
                torch.randn(parts["data"].shape, generator=generator, device=generator.device) * scale
            )
        case Nvfp4():
            parts["scale"].copy_(_uniform(parts["scale"].shape, generator) * 100)
            parts["row_scale"].copy_(_uniform(parts["row_scale"].shape, generator) * scale / 250)
        case Mxfp4():
            parts["scale"].random_(118, 122, generator=generator)
        case Fp8():
            parts["data"].copy_((_normal(parts["data"].shape, generator) * 100).clamp_(-448, 448))
            parts["scale"].mul_(scale / 100)
        case IntGroup(bits=bits):
            parts["scale"].mul_(scale / (1 << bits - 2))
            if "zero" in parts:
                middle = 1 << bits - 1
                parts["zero"].random_(middle - bits, middle + bits, generator=generator)
        case Planes():
            _scale_planes(parts, format, scale, generator)
    return matrix


def _scale_planes(
    parts: Mapping[str, torch.Tensor], format: Planes, scale: float, generator: torch.Generator
) -> None:
    size = scale / (64 if format.table else 1 << format.low_bits + format.high_bits - 2)
    half = 1 << format.low_bits + format.high_bits - 1
    if format.scales == "number":
        parts["scale"].mul_(size)
    elif format.scales == "centred":
        parts["scale"].mul_(size)
        parts["scale"][..., 1::2] -= size
    elif format.scales == "super":
        parts["scale"].random_(-32, 32, generator=generator)
        parts["super"].mul_(size / 16)
    else:
        parts["super"].mul_(size / 8)
        parts["super"][..., 1::2] *= half


def _uniform(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, device=generator.device).uniform_(0.5, 1.5, generator=generator)


def _normal(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)
