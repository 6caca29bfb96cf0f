"""Routed experts by FlashInfer's grouped products (CUTLASS) of bf16 weights as they lie, for prompts.

Not by its `cutlass_fused_moe`: that wants up rows before gate rows, so all these weights would have to be in
memory twice, and it takes 248 files to build.
"""

import torch

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.experts import ExpertWeights, slots_of_pairs
from moebius_kernels.flashinfer.admission import experts_refusal
from moebius_kernels.flashinfer.package import not_compiled, required
from moebius_kernels.registry import Backend, Query
from moebius_kernels.router import Route
from moebius_kernels.triton.activations import gated
from moebius_kernels.triton.experts import sum_experts

required()

_PRODUCT_BYTES = 32 << 20


def routed_experts(
    x: torch.Tensor, route: Route, weights: ExpertWeights, activation: Activation = SILU
) -> torch.Tensor:
    """As the reference; x bf16."""
    from flashinfer import SegmentGEMMWrapper

    num_slots = weights.num_slots
    # Pairs in the order of their slots, and where each slot's begin.
    ordered, order = slots_of_pairs(route, weights).sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_slots + 1, device=x.device))
    memory = torch.empty(_PRODUCT_BYTES, dtype=torch.int8, device=x.device)
    product = SegmentGEMMWrapper(memory, backend="sm90")

    def products(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        result = rows.new_empty(len(rows), matrices.shape[1])
        product.run(rows, matrices, num_slots, weight_column_major=True, out=result, seg_indptr=starts)
        return result

    inputs = x.index_select(0, order // route.experts.shape[1])
    middle = gated(products(inputs, weights.gate_up[0].parts["data"]), activation)
    outputs = products(middle, weights.down.parts["data"])
    pairs = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return sum_experts(pairs.unsqueeze(0), route.experts.contiguous(), route.weights, weights)


def _admits(query: Query) -> str | None:
    if reason := experts_refusal(query):
        return reason
    from flashinfer.jit.gemm.core import gen_gemm_sm90_module

    return not_compiled(gen_gemm_sm90_module())


BACKENDS = (
    Backend(
        "routed_experts",
        "flashinfer",
        routed_experts,
        architectures=frozenset({(9, 0)}),
        formats=frozenset({"bf16"}),
        admits=_admits,
    ),
)
