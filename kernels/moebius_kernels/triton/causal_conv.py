"""The short causal convolution: a launch for requests with one row each, two for the others."""

from typing import Literal

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels import causal_conv as reference
from moebius_kernels.device_plan import CHUNK_ROWS, DeviceStatePlan
from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend
from moebius_kernels.state_plan import StatePlan
from moebius_kernels.triton.targets import ARCHITECTURES, ceil_div, overlapping, power_of_two

_CHANNELS = 128
# Rows of a chunk that a program has at a time.
_ROWS = 16


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    plan: StatePlan,
    activation: Literal["silu"] | None,
    dilation: int = 1,
) -> torch.Tensor:
    """As `moebius_kernels.causal_conv.causal_conv1d`. Rows of requests whose slot is -1 become 0."""
    if plan.segments and not isinstance(plan, DeviceStatePlan):
        return reference.causal_conv1d(x, weight, bias, states, plan, activation, dilation)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels, taps = weight.shape
    kept = (taps - 1) * dilation
    blocks = ceil_div(channels, _CHANNELS)
    options = {
        "TAPS": taps, "DILATION": dilation, "KEPT": kept, "BIAS": bias is not None,
        "SILU": activation == "silu", "CHANNELS": _CHANNELS,
    }  # fmt: skip
    kept_tile = power_of_two(max(kept, 1))
    tensors = (x, weight, x if bias is None else bias, states, output)
    if count := len(plan.rows):
        launch(
            _one_row, (count, blocks), *tensors, plan.rows, plan.slots, channels, x.stride(0),
            KEPT_TILE=kept_tile, **options, **overlapping(x),
        )  # fmt: skip
    if isinstance(plan, DeviceStatePlan) and plan.segments:
        launch(
            _rows, (len(plan.chunks) * (CHUNK_ROWS // _ROWS), blocks), *tensors, plan.chunks, channels,
            x.stride(0),
            PARTS=CHUNK_ROWS // _ROWS, ROWS=_ROWS, **options, **overlapping(x),
        )  # fmt: skip
        launch(
            _keep, (len(plan.segments), blocks), x, states, plan.spans, channels, x.stride(0),
            KEPT=kept, KEPT_TILE=kept_tile, CHANNELS=_CHANNELS, **overlapping(x),
        )  # fmt: skip
    return output


@triton.jit
def _activated(y, SILU: tl.constexpr):
    if SILU:
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def _one_row(
    x, weight, bias, states, output, request_rows, request_slots, channels, x_row,
    TAPS: tl.constexpr, DILATION: tl.constexpr, KEPT: tl.constexpr, KEPT_TILE: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr,
    CHANNELS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(request_rows + request).to(tl.int64)
    slot = tl.load(request_slots + request).to(tl.int64)
    there = inside & (slot >= 0)
    past = states + (slot * channels + channel) * KEPT
    own = tl.load(x + row * x_row + channel, mask=inside, other=0.0)
    y = own.to(tl.float32) * tl.load(weight + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(
        tl.float32
    )
    for tap in tl.static_range(TAPS - 1):
        before = tl.load(past + tap * DILATION, mask=there, other=0.0).to(tl.float32)
        y += before * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(there, _activated(y, SILU), 0.0)
    tl.store(output + row * channels + channel, y.to(output.dtype.element_ty), mask=inside)
    if KEPT > 0:
        place = tl.arange(0, KEPT_TILE)
        later = there[:, None] & (place < KEPT - 1)[None, :]
        moved = tl.load(past[:, None] + place[None, :] + 1, mask=later, other=0.0)
        moved = tl.where((place == KEPT - 1)[None, :], own.to(moved.dtype)[:, None], moved)
        # All of it is read before any of it is written.
        tl.debug_barrier()
        tl.store(past[:, None] + place[None, :], moved, mask=there[:, None] & (place < KEPT)[None, :])


@triton.jit
def _rows(
    x, weight, bias, states, output, chunks, channels, x_row,
    PARTS: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, DILATION: tl.constexpr, KEPT: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr,
    CHANNELS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) // PARTS
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.load(chunks + 4 * chunk).to(tl.int64) + tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
    there = (row < tl.load(chunks + 4 * chunk + 1))[:, None] & inside[None, :]
    # How many rows of the segment come before.
    before = row - tl.load(chunks + 4 * chunk + 2)
    slot = tl.load(chunks + 4 * chunk + 3).to(tl.int64)
    past = states + (slot * channels + channel) * KEPT
    y = tl.zeros((ROWS, CHANNELS), tl.float32)
    if BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        lag = (TAPS - 1 - tap) * DILATION
        new = (before >= lag)[:, None]
        own = tl.load(x + (row - lag)[:, None] * x_row + channel[None, :], mask=there & new, other=0.0).to(
            tl.float32
        )
        if lag > 0:
            at = past[None, :] + (KEPT - lag + before)[:, None]
            own += tl.load(at, mask=there & (before < lag)[:, None], other=0.0).to(tl.float32)
        y += own * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = _activated(y, SILU)
    tl.store(output + row[:, None] * channels + channel[None, :], y.to(output.dtype.element_ty), mask=there)


@triton.jit
def _keep(
    x, states, spans, channels, x_row, KEPT: tl.constexpr, KEPT_TILE: tl.constexpr, CHANNELS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Leaves the last KEPT inputs of a segment in its state."""
    segment = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(spans + 4 * segment).to(tl.int64)
    length = tl.load(spans + 4 * segment + 1) - first
    slot = tl.load(spans + 4 * segment + 2).to(tl.int64)
    place = tl.arange(0, KEPT_TILE)
    inside = (channel < channels)[:, None] & (place < KEPT)[None, :]
    past = states + ((slot * channels + channel) * KEPT)[:, None]
    index = length - KEPT + place
    new = inside & (index >= 0)[None, :]
    old = inside & (index < 0)[None, :]
    last = tl.load(x + (first + index)[None, :] * x_row + channel[:, None], mask=new, other=0.0).to(
        tl.float32
    )
    last += tl.load(past + (place + length)[None, :], mask=old, other=0.0).to(tl.float32)
    # All of it is read before any of it is written.
    tl.debug_barrier()
    tl.store(past + place[None, :], last.to(states.dtype.element_ty), mask=inside)


BACKENDS = (Backend("causal_conv1d", "triton", causal_conv1d, architectures=ARCHITECTURES),)
