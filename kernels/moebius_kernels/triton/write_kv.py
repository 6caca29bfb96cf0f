"""Keys and values into pages, in one launch."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels import paged_attention as reference
from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.device_plan import DeviceAttentionPlan
from moebius_kernels.kv_pages import KvPages
from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend, Query
from moebius_kernels.triton.kv_rows import FORMAT_CODES, fault_of, scales_of, store_rows
from moebius_kernels.triton.targets import ARCHITECTURES, FP8_ARCHITECTURES, overlapping, power_of_two

# Numbers that a program can hold.
LARGEST_TILE = 1 << 14


def write_kv(
    k: torch.Tensor, v: torch.Tensor | None, kv_pages: KvPages, plan: AttentionPlan | DeviceAttentionPlan
) -> torch.Tensor:
    """As `moebius_kernels.paged_attention.write_kv`; rows whose slot is -1 are not kept."""
    if isinstance(plan, AttentionPlan):
        return reference.write_kv(k, v, kv_pages, plan)
    keys, values = kv_pages.keys, kv_pages.values
    faults = torch.empty(k.shape[0], dtype=k.dtype, device=k.device)
    other = keys if values is None else values
    rows = k if v is None else v
    heads = power_of_two(kv_pages.kv_heads)
    width, value_width = tile_width(keys.dim), tile_width(other.dim)
    launch(
        _write,
        (k.shape[0],),
        k, rows, keys.numbers, scales_of(keys), other.numbers, scales_of(other), plan.slots, faults,
        k.stride(0), k.stride(1), rows.stride(0), rows.stride(1),
        KV_HEADS=kv_pages.kv_heads, HEADS=heads, KEY_DIM=keys.dim, KEY_WIDTH=width,
        VALUE_DIM=0 if values is None else values.dim, VALUE_WIDTH=value_width,
        FORMAT=FORMAT_CODES[keys.format],
        num_warps=max(1, min(8, heads * max(width, value_width) // 256)), **overlapping(k),
    )  # fmt: skip
    return faults


def tile_width(dim: int) -> int:
    """Whole blocks of the format INT8."""
    return max(32, power_of_two(dim))


@triton.jit
def _write(
    k, v, key_numbers, key_scales, value_numbers, value_scales, slots, faults, k_row, k_head, v_row, v_head,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    FORMAT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    exists = head < KV_HEADS
    if OVERLAP:
        gdc_wait()
    slot = tl.load(slots + token).to(tl.int64)
    there = exists & (slot >= 0)
    rows = slot * KV_HEADS + head
    column = tl.arange(0, KEY_WIDTH)
    inside = exists[:, None] & (column < KEY_DIM)[None, :]
    x = tl.load(k + token * k_row + head[:, None] * k_head + column[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    fault = fault_of(x)
    store_rows(x, key_numbers, key_scales, rows, there, KEY_DIM, KEY_WIDTH, FORMAT)
    if VALUE_DIM > 0:
        column = tl.arange(0, VALUE_WIDTH)
        inside = exists[:, None] & (column < VALUE_DIM)[None, :]
        x = tl.load(v + token * v_row + head[:, None] * v_head + column[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32)
        fault += fault_of(x)
        store_rows(x, value_numbers, value_scales, rows, there, VALUE_DIM, VALUE_WIDTH, FORMAT)
    tl.store(faults + token, fault.to(faults.dtype.element_ty))
    if OVERLAP:
        gdc_launch_dependents()


def admits_pages(query: Query) -> str | None:
    """For kernels that read or write pages."""
    pages = query.arguments["kv_pages"]
    if pages["keys"]["format"] == "fp8" and query.device.architecture not in FP8_ARCHITECTURES:
        return "the architecture has no conversion from and to e4m3"
    return None


def _admits(query: Query) -> str | None:
    heads, dim = query.arguments["k"].shape
    if power_of_two(heads) * tile_width(dim) > LARGEST_TILE:
        return f"{heads} heads of {dim} do not fit a program"
    return admits_pages(query)


BACKENDS = (Backend("write_kv", "triton", write_kv, architectures=ARCHITECTURES, admits=_admits),)
