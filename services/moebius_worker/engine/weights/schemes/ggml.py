"""GGUF's tensors: the form follows from each tensor's type."""

from collections.abc import Mapping

import torch
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.codes import pack_nibbles
from moebius_kernels.formats.ggml import GGML_TYPES, Ggml
from moebius_kernels.formats.ggml_blocks import NIBBLES, fields
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.weights.scheme import ReadTensor, StoredForm
from moebius_worker.engine.weights.schemes.factors import need_row_factors, row_factors
from moebius_worker.engine.weights.schemes.module import Module
from moebius_worker.engine.weights.schemes.plain import FLOATING, plain_form

# That weights may have, beside floating-point numbers.
BLOCK_TYPES = GGML_TYPES | {Type.MXFP4, Type.NVFP4}


class GgmlScheme:
    """Tensors have the logical shape [R, C] and the type's name as their dtype; block types are read as
    uint8 [R, bytes of a row]. NVFP4 has a factor beside it: `MODULE.scale`, and `MODULE.input_scale`, unused.
    """

    name = "gguf"

    def form(self, weight: str, tensors: Mapping[str, TensorInfo]) -> StoredForm:
        info = tensors.get(weight)
        if info is None or info.dtype in FLOATING:
            return plain_form(weight, tensors)
        if info.dtype not in Type.__members__ or Type[info.dtype] not in BLOCK_TYPES:
            raise CheckpointError(
                f"{weight} in {info.file} has the type {info.dtype}, which is not supported. Supported are "
                f"{', '.join([*FLOATING, *sorted(type_.name for type_ in BLOCK_TYPES)])}."
            )
        if len(info.shape) != 2:
            raise CheckpointError(
                f"{weight} is {info.dtype} {list(info.shape)} in {info.file}, which only matrices can be."
            )
        if info.dtype == "NVFP4":
            return _nvfp4(Module(weight.removesuffix(".weight"), tensors), info.shape)
        if info.dtype == "MXFP4":
            return StoredForm(Mxfp4(), info.shape, (weight,), lambda read: _mxfp4_parts(read(weight)))
        return StoredForm(Ggml(Type[info.dtype]), info.shape, (weight,), lambda read: {"data": read(weight)})


def _mxfp4_parts(rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """Of blocks of a power of two and 16 bytes: elements 0 to 15 in the low nibbles, then the others."""
    blocks = rows.unflatten(-1, (-1, 17))
    codes = fields(blocks[..., 1:], 16, NIBBLES)
    return {"data": pack_nibbles(codes).flatten(-2), "scale": blocks[..., 0].contiguous()}


def _nvfp4(module: Module, shape: tuple[int, ...]) -> StoredForm:
    """Of blocks of four E4M3 factors, without sign, and 8 bytes for each, which hold 16 elements likewise."""
    weight, rows = module.tensor_name("weight"), shape[0]
    has_scale = module.find("scale") is not None
    if has_scale:
        need_row_factors(module, "scale", "NVFP4", "F32", rows)

    def parts(read: ReadTensor) -> Mapping[str, torch.Tensor]:
        blocks = read(weight).unflatten(-1, (-1, 36))
        codes = fields(blocks[..., 4:], 8, NIBBLES)
        scale = read(module.tensor_name("scale")) if has_scale else torch.ones(1)
        return {
            "data": pack_nibbles(codes).flatten(-2),
            "scale": blocks[..., :4].flatten(-2).contiguous().view(torch.float8_e4m3fn),
            "row_scale": row_factors(scale, rows),
        }

    return StoredForm(Nvfp4(), shape, module.present("weight", "scale", "input_scale"), parts)
