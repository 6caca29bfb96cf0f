"""Normalisation of the last dimension, a launch each."""

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend, Query
from moebius_kernels.triton.targets import ARCHITECTURES, ceil_div, overlapping, power_of_two

_LONGEST = 1 << 14
# Numbers of a program.
_TILE = 2048
_PLAIN, _SILU, _SIGMOID, _L2 = (tl.constexpr(code) for code in range(4))
_GATES = {"silu": 1, "sigmoid": 2}


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    """As `moebius_kernels.rms_norm.rms_norm`."""
    return _normalise(x, x, weight, eps, offset, 0)


def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> torch.Tensor:
    """As `moebius_kernels.rms_norm.gated_rms_norm`."""
    return _normalise(x, z, weight, eps, 0.0, _GATES[activation])


def l2_norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """As `moebius_kernels.rms_norm.l2_norm`."""
    return _normalise(x, x, None, eps, 0.0, 3)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `moebius_kernels.fused.add_rms_norm`."""
    size = x.shape[-1]
    x, residual = x.reshape(-1, size), residual.reshape(-1, size)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    block = power_of_two(size)
    launch(
        _add_norm,
        (len(x),),
        x, residual, weight, total, normed, eps, offset, x.stride(0), residual.stride(0),
        SIZE=size, BLOCK=block, num_warps=max(1, min(16, block // 512)), **overlapping(x),
    )  # fmt: skip
    return total, normed


def _normalise(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, kind: int
) -> torch.Tensor:
    """`kind`: one of the constants at the top."""
    size = x.shape[-1]
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, z = _three_dimensions(x), _three_dimensions(z)
    rows = x.shape[0] * x.shape[1]
    block = power_of_two(size)
    share = max(1, _TILE // block)
    launch(
        _norm,
        (ceil_div(rows, share),),
        x, z, x if weight is None else weight, output, eps, offset, rows,
        x.shape[1], x.stride(0), x.stride(1), z.stride(0), z.stride(1),
        SIZE=size, BLOCK=block, ROWS=share, WEIGHT=weight is not None, KIND=kind,
        num_warps=max(1, min(16, share * block // 512)), **overlapping(x),
    )  # fmt: skip
    return output


def _three_dimensions(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, size], a view if there are no more dimensions."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, 1, x.shape[-1])


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, z, weight, output, eps, offset, rows, heads, x_row, x_head, z_row, z_head,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WEIGHT: tl.constexpr, KIND: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    at = (row // heads) * x_row + (row % heads) * x_head
    if WEIGHT:
        factor = tl.load(weight + column, mask=column < SIZE, other=0.0).to(tl.float32) + offset
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    wide = tl.load(x + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(wide * wide, 1)
    if KIND != _L2:
        squares = squares / SIZE
    y = wide * (1.0 / tl.sqrt_rn(squares + eps))[:, None]
    if WEIGHT:
        y = y * factor[None, :]
    if KIND != _PLAIN and KIND != _L2:
        at = (row // heads) * z_row + (row % heads) * z_head
        gate = tl.load(z + at[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        y = y * tl.sigmoid(gate)
        if KIND == _SILU:
            y = y * gate
    tl.store(output + row[:, None] * SIZE + column[None, :], y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm(
    x, residual, weight, total, normed, eps, offset, x_row, residual_row,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + offset
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    wide = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(residual + row * residual_row + column, mask=inside, other=0.0).to(tl.float32)
    summed = wide.to(total.dtype.element_ty)
    tl.store(total + row * SIZE + column, summed, mask=inside)
    # What is normalised is the sum as it is kept.
    wide = summed.to(tl.float32)
    y = wide * (1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / SIZE + eps)) * factor
    tl.store(normed + row * SIZE + column, y.to(normed.dtype.element_ty), mask=inside)


def _admits(query: Query) -> str | None:
    size = query.arguments["x"].shape[-1]
    return f"rows of {size} numbers, it takes {_LONGEST}" if size > _LONGEST else None


def _backend(operation: str, function: Any) -> Backend:
    return Backend(operation, "triton", function, architectures=ARCHITECTURES, admits=_admits)


BACKENDS = (
    _backend("rms_norm", rms_norm),
    _backend("add_rms_norm", add_rms_norm),
    _backend("gated_rms_norm", gated_rms_norm),
    _backend("l2_norm", l2_norm),
)
