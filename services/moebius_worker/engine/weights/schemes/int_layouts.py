"""Integer weights as compressed-tensors stores them: packed into 32-bit words, or as they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from moebius_kernels.formats.codes import unpack_nibbles
from moebius_kernels.formats.int_group import IntGroup
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.weights.scheme import ReadTensor, StoredForm
from moebius_worker.engine.weights.schemes.factors import need_row_factors
from moebius_worker.engine.weights.schemes.module import ACTIVATIONS, Module
from moebius_worker.engine.weights.schemes.plain import FLOATING, SCALES


@dataclass(frozen=True, slots=True)
class PackedIntLayout:
    """`weight_packed` I32 [R, C * bits/32], the first element lowest; `weight_scale` [R, C/group];
    `weight_shape` I64 [2]. Asymmetric: `weight_zero_point` I32, of [R, C/group] packed along the rows.

    Elements and zero points are stored with half the range added.
    """

    bits: Literal[4, 8]
    group: int | None
    symmetric: bool

    def form(self, module: Module) -> StoredForm:
        title = f"INT{self.bits} of {f'groups of {self.group}' if self.group else 'channels'}"
        per_word = 32 // self.bits
        rows, words = module.need("weight_packed", title, "I32", (None, None)).shape
        columns = words * per_word
        groups = -(-columns // self.group) if self.group else 1
        scale = module.need("weight_scale", title, SCALES, (rows, groups))
        if not self.symmetric:
            module.need("weight_zero_point", title, "I32", (-(-rows // per_word), groups))

        def parts(read: ReadTensor) -> Mapping[str, torch.Tensor]:
            if module.find("weight_shape") is not None:
                _check_shape(module, read(module.tensor_name("weight_shape")), (rows, columns))
            components = {
                "data": read(module.tensor_name("weight_packed")).contiguous().view(torch.uint8),
                "scale": read(module.tensor_name("weight_scale")),
            }
            if not self.symmetric:
                packed = read(module.tensor_name("weight_zero_point"))
                components["zero"] = unpack_words(packed.t(), self.bits)[:, :rows].t().contiguous()
            return components

        factors = ("weight_scale",) if self.symmetric else ("weight_scale", "weight_zero_point")
        sources = module.present("weight_packed", *factors, "weight_shape", *ACTIVATIONS)
        form = IntGroup(self.bits, self.group, not self.symmetric, FLOATING[scale.dtype])
        return StoredForm(form, (rows, columns), sources, parts)


@dataclass(frozen=True, slots=True)
class Int8Layout:
    """`weight` I8 [R, C], `weight_scale` [R, 1] or [R, C/group]; asymmetric: `weight_zero_point` I8 alike."""

    group: int | None
    symmetric: bool

    def form(self, module: Module) -> StoredForm:
        rows, columns = module.need("weight", "INT8", "I8", (None, None)).shape
        groups = -(-columns // self.group) if self.group else 1
        factors = ["weight_scale"] if self.symmetric else ["weight_scale", "weight_zero_point"]
        for suffix in factors:
            dtypes = SCALES if suffix == "weight_scale" else "I8"
            if self.group:
                module.need(suffix, "INT8", dtypes, (rows, groups))
            else:
                need_row_factors(module, suffix, "INT8", dtypes, rows)

        def parts(read: ReadTensor) -> Mapping[str, torch.Tensor]:
            def by_row(suffix: str) -> torch.Tensor:
                return read(module.tensor_name(suffix)).reshape(-1, groups).expand(rows, groups).contiguous()

            components = {
                "data": _unsigned(read(module.tensor_name("weight"))),
                "scale": by_row("weight_scale"),
            }
            if not self.symmetric:
                components["zero"] = _unsigned(by_row("weight_zero_point"))
            return components

        scale = module.tensors[module.tensor_name("weight_scale")]
        form = IntGroup(8, self.group, not self.symmetric, FLOATING[scale.dtype])
        return StoredForm(form, (rows, columns), module.present("weight", *factors, *ACTIVATIONS), parts)


def unpack_words(words: torch.Tensor, bits: Literal[4, 8]) -> torch.Tensor:
    """uint8 [..., n * 32/bits] of int32 [..., n], the lowest bits first."""
    as_bytes = words.contiguous().view(torch.uint8)
    return unpack_nibbles(as_bytes) if bits == 4 else as_bytes


def _unsigned(signed: torch.Tensor) -> torch.Tensor:
    """uint8 of int8, 128 added."""
    return signed.view(torch.uint8) ^ 128


def _check_shape(module: Module, shape: torch.Tensor, wanted: tuple[int, int]) -> None:
    if tuple(shape.tolist()) != wanted:
        raise CheckpointError(
            f"{module.name} in {module.files()} has the shape {shape.tolist()}, where {list(wanted)} "
            "is packed. Columns that do not fill their 32-bit words are not supported."
        )
