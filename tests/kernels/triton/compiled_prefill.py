"""Compiles attention that divides its labour for sm_90, without a GPU, and prints what came of it as JSON.

A program of its own: where Triton's interpreter is on, nothing can be compiled.
"""

import json
import sys
from typing import Any

import torch

from moebius_kernels.device_plan import DeviceAttentionPlan
from moebius_kernels.jit.triton_ahead import pretend
from moebius_kernels.kv_pages import KvFormat, KvPages, StoredRows
from moebius_kernels.triton import prefill_attention_hopper
from tests.kernels.triton.compiled_hopper import counts

# Query heads, KV heads, dimension, window, sinks.
_SHAPES = {"qwen3-moe": (32, 4, 128, None, False), "gpt-oss": (64, 8, 64, 128, True)}
# Rows, requests, pages, and how many of them a request may have, of steps that have one kernel.
_STEPS = ((304, 2, 600, 256), (17, 3, 599, 1))
_PAGE = 16


def compiled(shape: str) -> dict[str, Any]:
    kernel = prefill_attention_hopper._prefill_hopper
    kernel.device_caches.clear()
    for step in _STEPS:
        _attend(*_SHAPES[shape], *step)
    return counts(kernel)


def _attend(
    heads: int, kv_heads: int, dim: int, window: int | None, has_sinks: bool,
    rows: int, requests: int, pages: int, most_pages: int,
) -> None:  # fmt: skip
    stored = [StoredRows(KvFormat.MODEL, _empty(pages, _PAGE, kv_heads, dim), None) for _ in range(2)]
    plan = DeviceAttentionPlan(
        0, *_ints(3, requests), _ints(requests, most_pages), _ints(rows), _ints(64, 2), _ints(requests, 256),
        _PAGE, window,
    )  # fmt: skip
    q = _empty(rows, heads, dim)
    sinks = _empty(heads) if has_sinks else None
    prefill_attention_hopper.prefill_attention(
        q, KvPages(*stored, dim), plan, torch.empty_like(q), dim**-0.5, sinks
    )


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int32)


if __name__ == "__main__":
    pretend((9, 0))
    json.dump({shape: compiled(shape) for shape in sys.argv[1:]}, sys.stdout)
