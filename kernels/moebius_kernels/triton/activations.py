"""Gated activations, a launch each."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.activations import Activation, ClampedSwiglu, GeluTanh, Silu
from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend
from moebius_kernels.triton.targets import ARCHITECTURES, ceil_div, overlapping

_BLOCK = 1024
_SILU, _GELU, _CLAMPED = (tl.constexpr(code) for code in range(3))
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """As `moebius_kernels.activations.gated`."""
    kind, limit, alpha = 0, 0.0, 0.0
    match activation:
        case Silu():
            pass
        case GeluTanh():
            kind = 1
        case ClampedSwiglu():
            kind, limit, alpha = 2, activation.limit, activation.alpha
    inner = gate_up.shape[-1] // 2
    output = gate_up.new_empty(*gate_up.shape[:-1], inner)
    rows = gate_up.reshape(-1, 2 * inner)
    launch(
        _gated,
        (ceil_div(output.numel(), _BLOCK),),
        rows, output, output.numel(), inner, rows.stride(0), limit, alpha, KIND=kind, BLOCK=_BLOCK,
        **overlapping(rows),
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["count"])
def _gated(
    rows, output, count, inner, stride, limit, alpha, KIND: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    at = rows + (index // inner) * stride + index % inner
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    if KIND == _SILU:
        y = gate * tl.sigmoid(gate) * up
    elif KIND == _GELU:
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        y = gate * tl.sigmoid(2.0 * _SQRT_2_OVER_PI * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        # A NaN stays one.
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        y = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    tl.store(output + index, y.to(output.dtype.element_ty), mask=inside)


BACKENDS = (Backend("gated", "triton", gated, architectures=ARCHITECTURES),)
