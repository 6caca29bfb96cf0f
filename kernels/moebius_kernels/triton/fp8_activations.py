"""Activations rounded to E4M3 in groups of 128 columns, each with a factor of its own.

The recipe of checkpoints that declare their activations as dynamically quantised: factor = largest / 448.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.formats.rounded_activations import GROUP, LARGEST, LEAST
from moebius_kernels.launch import launch
from moebius_kernels.triton.targets import ceil_div, overlapping

_GROUP, _LARGEST, _LEAST = tl.constexpr(GROUP), tl.constexpr(LARGEST), tl.constexpr(LEAST)
# Groups of a program.
_UNITS = 16


@dataclass(frozen=True, slots=True)
class Rounded:
    """`codes` e4m3fn [X, C] and `scale` fp32 [X, C/128], whose strides may be any."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> Self:
        """The factors of a group of columns lie side by side, as tiles and cuBLAS read them."""
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
        return cls(codes, torch.empty(columns // GROUP, rows, dtype=torch.float32, device=device).T)


def rounded_activations(x: torch.Tensor, sorted_pairs: torch.Tensor | None = None) -> Rounded:
    """x [T, C] bf16, C a multiple of 128. With `sorted_pairs` int32 [T * K] each token has K rows, where its
    pairs are among those."""
    x = x.contiguous()
    tokens, columns = x.shape
    groups = columns // GROUP
    places = x if sorted_pairs is None else _places(sorted_pairs)
    rows = tokens if sorted_pairs is None else len(sorted_pairs)
    rounded = Rounded.empty(rows, columns, x.device)
    units = tokens * groups
    launch(
        _round,
        (ceil_div(units, _UNITS),),
        x, places, rounded.codes, rounded.scale, rows, units,
        GROUPS=groups, COPIES=0 if sorted_pairs is None else rows // tokens, UNITS=_UNITS, **overlapping(x),
    )  # fmt: skip
    return rounded


def _places(sorted_pairs: torch.Tensor) -> torch.Tensor:
    """int32 [P]: where each pair is."""
    places = torch.empty_like(sorted_pairs)
    pairs = len(sorted_pairs)
    launch(_invert, (ceil_div(pairs, 256),), sorted_pairs, places, pairs, BLOCK=256, **overlapping(places))
    return places


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def _invert(sorted_pairs, places, pairs, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < pairs
    tl.store(places + tl.load(sorted_pairs + place, inside, 0), place, inside)


# Both follow from the tokens, but not both at once: a preflight, which tries few counts, would miss kernels.
@triton.jit(do_not_specialize_on_alignment=["rows", "units"])
def _round(
    x, places, codes, scale, rows, units,
    GROUPS: tl.constexpr, COPIES: tl.constexpr, UNITS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    unit = (tl.program_id(0) * UNITS + tl.arange(0, UNITS)).to(tl.int64)
    inside = unit < units
    column = tl.arange(0, _GROUP)[None, :]
    token, group = unit // GROUPS, unit % GROUPS
    value = tl.load(x + unit[:, None] * _GROUP + column, inside[:, None], 0.0).to(tl.float32)
    rounded, factor = round_group(value, True)
    if COPIES == 0:
        tl.store(codes + unit[:, None] * _GROUP + column, rounded, inside[:, None])
        tl.store(scale + group * rows + token, factor, inside)
    for copy in tl.static_range(COPIES):
        place = tl.load(places + token * COPIES + copy, inside, 0).to(tl.int64)
        tl.store(codes + (place * GROUPS + group)[:, None] * _GROUP + column, rounded, inside[:, None])
        tl.store(scale + group * rows + place, factor, inside)


@triton.jit
def round_group(value, EXACT: tl.constexpr):
    """fp32 [n, 128] -> e4m3 codes and the factor of each row, fp32. NaN stays NaN.

    EXACT: quotients are rounded once, as the recipe has it: bf16 numbers are often half-way between codes.
    """
    factor = tl.div_rn(tl.maximum(tl.max(tl.abs(value), 1), _LEAST), _LARGEST)
    if EXACT:
        quotient = tl.div_rn(value, tl.broadcast_to(factor[:, None], value.shape))
    else:
        quotient = value * (1.0 / factor)[:, None]
    return quotient.to(tl.float8e4nv), factor
