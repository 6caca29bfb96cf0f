"""Rotary position embedding, and in one launch all that is between a layer's projections and attention."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels import fused as reference
from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.device_plan import DeviceAttentionPlan
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend, Query
from moebius_kernels.rotary import Angles
from moebius_kernels.triton.kv_rows import FORMAT_CODES, fault_of, scales_of, store_rows
from moebius_kernels.triton.targets import ARCHITECTURES, ceil_div, overlapping, power_of_two
from moebius_kernels.triton.write_kv import LARGEST_TILE, admits_pages, tile_width

# Numbers of a program.
_TILE = 2048
# Tokens that are few, a power of two: as measured on an H200.
_FEW = 256


def apply_rotary(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """As `moebius_kernels.rotary.apply_rotary`."""
    tokens, heads, dim = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = power_of_two(dim)
    share = max(1, min(power_of_two(heads), _TILE // width))
    launch(
        _rotate,
        (tokens, ceil_div(heads, share)),
        x, angles.cos, angles.sin, output, heads, x.stride(0), x.stride(1),
        DIM=dim, WIDTH=width, TURNING=angles.cos.shape[-1], INTERLEAVED=angles.interleaved, HEADS=share,
        num_warps=max(1, min(8, share * width // 256)), **overlapping(x),
    )  # fmt: skip
    return output


def rotate_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    angles: Angles,
    kv_pages: KvPages,
    plan: AttentionPlan | DeviceAttentionPlan,
    *,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """As `moebius_kernels.fused.rotate_and_write_kv`; rows whose slot is -1 are not kept."""
    if isinstance(plan, AttentionPlan):
        norms = {"q_weight": q_weight, "k_weight": k_weight}
        return reference.rotate_and_write_kv(q, k, v, angles, kv_pages, plan, **norms, eps=eps, offset=offset)
    tokens, heads, dim = q.shape
    keys, values = kv_pages.keys, kv_pages.values
    assert values is not None
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    width, value_width = tile_width(keys.dim), tile_width(values.dim)
    # Few tokens need more programs and warps, many fewer that read keys and values again.
    tile, warps = (_TILE, 8) if tokens <= _FEW else (2 * _TILE, 4)
    share = max(1, min(power_of_two(heads), tile // width))
    kv_heads = power_of_two(kv_pages.kv_heads)
    launch(
        _rotate_and_write,
        (tokens, ceil_div(heads, share)),
        q, k, v, angles.cos, angles.sin, q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        output, keys.numbers, scales_of(keys), values.numbers, scales_of(values), plan.slots, heads, eps,
        offset,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KEY_DIM=dim, KEY_WIDTH=width, VALUE_DIM=values.dim, VALUE_WIDTH=value_width,
        TURNING=angles.cos.shape[-1], INTERLEAVED=angles.interleaved, NORM=q_weight is not None,
        HEADS=share, KV_HEADS=kv_pages.kv_heads, KV_TILE=kv_heads, FORMAT=FORMAT_CODES[keys.format],
        num_warps=max(1, min(warps, max(share, kv_heads) * width // 256)), **overlapping(q),
    )  # fmt: skip
    return output


@triton.jit
def _partner(column, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The column that turns together with another one; a column that does not turn is its own."""
    other = column ^ 1 if INTERLEAVED else (column + TURNING // 2) % TURNING
    return tl.where(column < TURNING, other, column)


@triton.jit
def _turned(x, partners, cos, sin, token, column, TURNING: tl.constexpr):
    """x and what turns with it [N, W], fp32."""
    turns = column < TURNING
    cosine = tl.load(cos + token * TURNING + column, mask=turns, other=1.0)
    sine = tl.load(sin + token * TURNING + column, mask=turns, other=0.0)
    # What does not turn need not be finite: it passes as it is.
    return tl.where(turns[None, :], x * cosine[None, :] + partners * sine[None, :], x)


@triton.jit
def _rotate(
    x, cos, sin, output, heads, x_row, x_head,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)
    inside = (head < heads)[:, None] & (column < DIM)[None, :]
    rows = x + token * x_row + head[:, None] * x_head
    other = _partner(column, TURNING, INTERLEAVED)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    own = tl.load(rows + column[None, :], mask=inside, other=0.0).to(tl.float32)
    partners = tl.load(rows + other[None, :], mask=inside, other=0.0).to(tl.float32)
    y = _turned(own, partners, cos, sin, token, column, TURNING)
    at = output + (token * heads + head[:, None]) * DIM + column[None, :]
    tl.store(at, y.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _normed_and_turned(
    x, exists, cos, sin, weight, token, eps, offset,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TURNING: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """The rows at the pointers x [N]: [N, WIDTH], fp32, rounded as separate operations would."""
    dtype: tl.constexpr = x.dtype.element_ty
    column = tl.arange(0, WIDTH)
    inside = exists[:, None] & (column < DIM)[None, :]
    other = _partner(column, TURNING, INTERLEAVED)
    own = tl.load(x[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    partners = tl.load(x[:, None] + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        length = (1.0 / tl.sqrt_rn(tl.sum(own * own, 1) / DIM + eps))[:, None]
        in_row = column < DIM
        own_weight = tl.load(weight + column, mask=in_row, other=0.0).to(tl.float32) + offset
        partner_weight = tl.load(weight + other, mask=in_row, other=0.0).to(tl.float32) + offset
        own = (own * length * own_weight[None, :]).to(dtype).to(tl.float32)
        partners = (partners * length * partner_weight[None, :]).to(dtype).to(tl.float32)
    return _turned(own, partners, cos, sin, token, column, TURNING).to(dtype).to(tl.float32)


@triton.jit
def _rotate_and_write(
    q, k, v, cos, sin, q_weight, k_weight,
    output, key_numbers, key_scales, value_numbers, value_scales, slots, heads, eps, offset,
    q_row, q_head, k_row, k_head, v_row, v_head,
    KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    TURNING: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, KV_TILE: tl.constexpr, FORMAT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some of one token's queries; the first program has its keys and values too. All look at these: a fault
    of theirs must show in the queries."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    kv_head = tl.arange(0, KV_TILE)
    is_kv = kv_head < KV_HEADS
    column = tl.arange(0, VALUE_WIDTH)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    key = _normed_and_turned(
        k + token * k_row + kv_head * k_head, is_kv, cos, sin, k_weight, token, eps, offset,
        KEY_DIM, KEY_WIDTH, TURNING, INTERLEAVED, NORM,
    )  # fmt: skip
    inside = is_kv[:, None] & (column < VALUE_DIM)[None, :]
    at = v + token * v_row + kv_head[:, None] * v_head + column[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    head = part * HEADS + tl.arange(0, HEADS)
    exists = head < heads
    query = _normed_and_turned(
        q + token * q_row + head * q_head, exists, cos, sin, q_weight, token, eps, offset,
        KEY_DIM, KEY_WIDTH, TURNING, INTERLEAVED, NORM,
    )  # fmt: skip
    fault = fault_of(key) + fault_of(value)
    wide = tl.arange(0, KEY_WIDTH)
    inside_q = exists[:, None] & (wide < KEY_DIM)[None, :]
    target = output + (token * heads + head[:, None]) * KEY_DIM + wide[None, :]
    tl.store(target, (query + fault).to(output.dtype.element_ty), mask=inside_q)
    if part == 0:
        slot = tl.load(slots + token).to(tl.int64)
        there = is_kv & (slot >= 0)
        rows = slot * KV_HEADS + kv_head
        store_rows(key, key_numbers, key_scales, rows, there, KEY_DIM, KEY_WIDTH, FORMAT)
        store_rows(value, value_numbers, value_scales, rows, there, VALUE_DIM, VALUE_WIDTH, FORMAT)


def _admits(query: Query) -> str | None:
    if query.arguments["kv_pages"]["values"] is None:
        return "values are in keys"
    for name in ("k", "v"):
        heads, dim = query.arguments[name].shape
        if power_of_two(heads) * tile_width(dim) > LARGEST_TILE:
            return f"{heads} heads of {dim} do not fit a program"
    return admits_pages(query)


BACKENDS = (
    Backend("apply_rotary", "triton", apply_rotary, architectures=ARCHITECTURES),
    Backend(
        "rotate_and_write_kv",
        "triton",
        rotate_and_write_kv,
        architectures=ARCHITECTURES,
        admits=_admits,
    ),
)
