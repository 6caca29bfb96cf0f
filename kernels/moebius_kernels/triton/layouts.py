"""How the kernels are told in which form a matrix is stored."""

from dataclasses import dataclass

import torch

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.e2m1_words import E2m1Words
from moebius_kernels.formats.format import Format, StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.int_words import IntWords
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.formats.planes import Planes

# Columns that kernels expand at once; a row's groups begin and end between them.
_OCTET = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """`code` and `scales` as in `decode.py`, `group` columns to a factor, `block_rows` rows to a scale.

    The parts by the names of the form's components, each as the kernel's pointer wants it; None: not there.
    `row_scale`: the part that has one fp32 a row, for the products.
    """

    code: str
    scales: str = "none"
    group: int = 1
    block_rows: int = 1
    codes: tuple[str, torch.dtype] | None = None
    high: tuple[str, torch.dtype] | None = None
    scale: tuple[str, torch.dtype] | None = None
    extra: tuple[str, torch.dtype] | None = None
    row_scale: str | None = None

    def tensors(self, matrix: StoredMatrix) -> tuple[torch.Tensor, ...]:
        """Codes, high plane, scales, what else scales need, row scales; the codes where there is none."""
        parts = matrix.parts
        given = [self.codes, self.high, self.scale, self.extra]
        first = next(iter(parts.values()))
        found = [first if part is None else parts[part[0]].view(part[1]) for part in given]
        return (*found, first if self.row_scale is None else parts[self.row_scale])


_PLANE_SCALES = {
    "number": torch.float16,
    "centred": torch.int32,
    "super": torch.int8,
    "super_nibble": torch.uint8,
}
_PLANE_HIGH = {1: torch.uint8, 2: torch.int16}


def layout_of(format: Format, columns: int) -> Layout | str:
    """The layout of matrices with so many columns, or why the kernels do not read them."""
    match format:
        case Dense(dtype=torch.bfloat16):
            return Layout("bf16", codes=("data", torch.bfloat16))
        case E2m1Words():
            return _e2m1(format.base, columns, "_words")
        case IntWords(group=group, centred=centred):
            layout = Layout(
                "int4_words",
                "centred" if centred else "number",
                group,
                codes=("data", torch.int32),
                scale=("scale", torch.int32),
            )
            return _words(columns, layout)
        case Nvfp4() | Mxfp4():
            return _e2m1(format, columns, "")
        case Fp8(block_rows=rows, block_columns=block_columns):
            group = columns if block_columns is None else block_columns
            layout = Layout(
                "e4m3",
                "block",
                group,
                rows,
                codes=("data", torch.int32),
                scale=("scale", torch.float32),
            )
            return _groups(columns, layout)
        case IntGroup(bits=bits, zero_point=zero_point, scale_dtype=dtype):
            layout = Layout(
                f"int{bits}",
                "zero" if zero_point else "number",
                format.group or columns,
                codes=("data", torch.int32),
                scale=("scale", dtype),
                extra=("zero", torch.uint8) if zero_point else None,
            )
            return _groups(columns, layout)
        case Planes(low_bits=low, high_bits=high, scales=scales):
            wide = torch.float32 if scales == "super" else torch.int32
            layout = Layout(
                "iq4_nl" if format.table else f"int{low + high}",
                scales,
                format.group,
                codes=("low", torch.int32 if low == 4 else torch.int16),
                high=("high", _PLANE_HIGH[high]) if high else None,
                scale=("scale", _PLANE_SCALES[scales]),
                extra=("super", wide) if scales.startswith("super") else None,
            )
            return _words(columns, layout)
    return f"the kernels do not read {format.name}"


def _e2m1(base: Nvfp4 | Mxfp4, columns: int, order: str) -> Layout | str:
    nvfp4 = isinstance(base, Nvfp4)
    layout = Layout(
        base.name + order,
        "byte",
        16 if nvfp4 else 32,
        codes=("data", torch.int32),
        scale=("scale", torch.uint8),
        row_scale="row_scale" if nvfp4 else None,
    )
    return _words(columns, layout)


def _words(columns: int, layout: Layout) -> Layout | str:
    return layout if columns % _OCTET == 0 else f"{columns} columns are no multiple of {_OCTET}"


def _groups(columns: int, layout: Layout) -> Layout | str:
    group = layout.group
    if group != columns and (group < _OCTET or group & group - 1):
        return f"groups of {group} columns are no power of two from {_OCTET} on"
    return _words(columns, layout)
