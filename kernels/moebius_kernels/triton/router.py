"""Routers: scores, the best groups and the best experts of a token, in one launch.

A row of logits that are NaN throughout goes to no expert: nothing is read for it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend, Query
from moebius_kernels.router import Route
from moebius_kernels.triton.targets import ARCHITECTURES, overlapping, power_of_two

_MOST_EXPERTS, _MOST_CHOSEN = 1024, 16
_SOFTMAX, _LOGITS, _SIGMOID = (tl.constexpr(code) for code in range(3))
# Below all that `_ordered` gives.
_NONE = tl.constexpr(-(1 << 63))
# What DeepSeek-V3 adds to a sum of weights before it divides by it.
_SMALLEST_SUM = 1e-20


def topk_softmax(
    logits: torch.Tensor,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
) -> Route:
    """As `moebius_kernels.router.topk_softmax`; of equals the first."""
    return _route(logits, None, top_k, groups, top_groups, 0, 1, renormalise, 0.0, scale)


def softmax_topk(logits: torch.Tensor, top_k: int) -> Route:
    """As `moebius_kernels.router.softmax_topk`; of equals the first."""
    return _route(logits, None, top_k, 1, 1, 1, 1, False, 0.0, 1.0)


def sigmoid_topk(
    logits: torch.Tensor,
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
) -> Route:
    """As `moebius_kernels.router.sigmoid_topk`; of equals the first."""
    return _route(logits, bias, top_k, groups, top_groups, 2, 2, renormalise, _SMALLEST_SUM, scale)


def _route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    groups: int,
    top_groups: int,
    kind: int,
    judged_by: int,
    renormalise: bool,
    smallest: float,
    scale: float,
) -> Route:
    tokens, total = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    if top_groups == groups:
        groups = top_groups = 1
    size = total // groups
    tile = power_of_two(groups) * power_of_two(size)
    launch(
        _choose,
        (tokens,),
        logits, logits if bias is None else bias, weights, experts, logits.stride(0), smallest, scale,
        GROUPS=groups, GROUP_TILE=power_of_two(groups), SIZE=size, SIZE_TILE=power_of_two(size),
        TOP_GROUPS=top_groups, JUDGED_BY=min(judged_by, size), TOP_K=top_k, TOP_TILE=power_of_two(top_k),
        KIND=kind, BIAS=bias is not None, RENORMALISE=renormalise,
        num_warps=1 if tile <= 256 else 4, **overlapping(logits),
    )  # fmt: skip
    return Route(weights, experts)


@triton.jit
def _ordered(x):
    """fp32 as int64 that is ordered alike, above all others NaN, in the upper half of its bits."""
    bits = x.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, flipped).to(tl.int64) << 32


@triton.jit
def _best(x):
    """The largest of a matrix."""
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def _choose(
    logits, bias, weights, experts, stride, smallest, scale,
    GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr, SIZE: tl.constexpr, SIZE_TILE: tl.constexpr,
    TOP_GROUPS: tl.constexpr, JUDGED_BY: tl.constexpr, TOP_K: tl.constexpr, TOP_TILE: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr, RENORMALISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token; experts lie in a matrix whose rows are the groups."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUP_TILE)
    member = tl.arange(0, SIZE_TILE)
    expert = group[:, None] * SIZE + member[None, :]
    exists = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    scores = tl.load(logits + token * stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    # Those of a row of hidden states that is not finite, or does not exist.
    lost = tl.sum(tl.sum((exists & (scores == scores)).to(tl.int32), 1), 0) == 0
    if KIND == _SOFTMAX:
        scores = tl.exp(scores - _best(scores))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    if KIND == _SIGMOID:
        scores = tl.sigmoid(scores)
    ranks = scores
    if BIAS:
        ranks += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    # The number of the expert in the lower half: of equals the first is the largest.
    NUMBERS: tl.constexpr = GROUP_TILE * SIZE_TILE
    number = group[:, None] * SIZE_TILE + member[None, :]
    keys = _ordered(ranks) + (NUMBERS - 1 - number)
    keys = tl.where(exists, keys, _NONE)
    if TOP_GROUPS < GROUPS:
        best = tl.max(keys, 1)
        merit = tl.max(tl.where(keys == best[:, None], ranks, float("-inf")), 1)
        if JUDGED_BY == 2:
            second = tl.where(keys == best[:, None], _NONE, keys)
            next_best = tl.max(second, 1)
            merit += tl.max(tl.where(second == next_best[:, None], ranks, float("-inf")), 1)
        group_keys = _ordered(merit) + (GROUP_TILE - 1 - group)
        group_keys = tl.where(group < GROUPS, group_keys, _NONE)
        kept = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            chosen = group_keys == tl.max(group_keys, 0)
            kept = kept | chosen
            group_keys = tl.where(chosen, _NONE, group_keys)
        keys = tl.where(kept[:, None], keys, _NONE)
    place = tl.arange(0, TOP_TILE)
    own_weights = tl.zeros((TOP_TILE,), tl.float32)
    own_experts = tl.zeros((TOP_TILE,), tl.int64)
    for rank in tl.static_range(TOP_K):
        chosen = keys == _best(keys)
        weight = tl.sum(tl.sum(tl.where(chosen, scores, 0.0), 1), 0)
        number_of = tl.sum(tl.sum(tl.where(chosen, expert, 0), 1), 0)
        own_weights = tl.where(place == rank, weight, own_weights)
        own_experts = tl.where(place == rank, number_of, own_experts)
        keys = tl.where(chosen, _NONE, keys)
    real = place < TOP_K
    if KIND == _LOGITS:
        top = tl.max(tl.where(real, own_weights, float("-inf")), 0)
        own_weights = tl.where(real, tl.exp(own_weights - top), 0.0)
        own_weights = own_weights / tl.sum(own_weights, 0)
    if RENORMALISE:
        own_weights = own_weights / (tl.sum(own_weights, 0) + smallest)
    tl.store(weights + token * TOP_K + place, own_weights * scale, mask=real)
    tl.store(experts + token * TOP_K + place, tl.where(lost, -1, own_experts), mask=real)


def _admits(query: Query) -> str | None:
    [experts] = query.arguments["logits"].shape
    chosen = query.arguments["top_k"]
    groups, top_groups = (query.arguments.get(name, 1) for name in ("groups", "top_groups"))
    if top_groups * (experts // groups) < chosen:
        return f"{chosen} experts of {top_groups} groups of {experts // groups}"
    if power_of_two(groups) * power_of_two(experts // groups) > _MOST_EXPERTS or chosen > _MOST_CHOSEN:
        return f"{chosen} of {experts} experts, it takes {_MOST_CHOSEN} of {_MOST_EXPERTS}"
    return None


def _backend(operation: str, function: Any) -> Backend:
    return Backend(operation, "triton", function, architectures=ARCHITECTURES, admits=_admits)


BACKENDS = (
    _backend("topk_softmax", topk_softmax),
    _backend("softmax_topk", softmax_topk),
    _backend("sigmoid_topk", sigmoid_topk),
)
