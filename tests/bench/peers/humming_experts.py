"""Humming's experts (PyPI humming-kernels 0.1), called as vLLM 0.33 does: indexed, by its own heuristics."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from humming.config import LayerConfig
from humming.forward import humming_forward, may_process_input
from humming.kernel.humming import HummingKernel
from humming.schema import HummingInputSchema, HummingWeightSchema
from humming.transform import prepare_and_transform_humming_tensors
from humming.tune import get_heuristics_config

from moebius_kernels.activations import Activation, ClampedSwiglu, Silu
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from moebius_kernels.router import Route
from tests.bench.peers.blocks import blocks_of, weighted_sum

_COMPUTE = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
# What vLLM pads to.
_ROWS, _COLUMNS = 256, 128


@dataclass(frozen=True)
class _Product:
    config: LayerConfig
    # For each set of weights.
    tensors: Sequence[Mapping[str, torch.Tensor]]

    def tuning(self, pairs: int) -> dict[str, Any]:
        found: dict[str, Any] = get_heuristics_config(self.config, shape_m=pairs, gemm_type="indexed")
        return found


class HummingExperts:
    """`fp8_activations`: FP8 weights times activations that are quantised by token and 128 columns."""

    def __init__(
        self, layer: ExpertWeights, activation: Activation, sets: int, *, fp8_activations: bool = False
    ) -> None:
        self.experts = layer.num_slots
        self.gate_up = _product(layer.gate_up[0], layer.gate_up_bias, sets, fp8_activations)
        self.down = _product(layer.down, layer.down_bias, sets, fp8_activations)
        self.activation = _expression(activation)
        self.locks = torch.zeros(2048, dtype=torch.int32, device=layer.down.parts["data"].device)

    def compile(self, pairs: Sequence[int]) -> None:
        """For so many pairs, side by side."""
        for product in (self.gate_up, self.down):
            wanted = [(0, 1 << 30, product.tuning(count)) for count in pairs]
            HummingKernel.prepare_kernels(product.config.to_str(), json.dumps(_COMPUTE), wanted)

    def __call__(self, x: torch.Tensor, route: Route, index: int) -> torch.Tensor:
        tokens, top_k = route.experts.shape
        pairs = tokens * top_k
        first, second = self.gate_up.tuning(pairs), self.down.tuning(pairs)
        blocks = blocks_of(route.experts, self.experts, first["block_shape"][0])
        gate_up = self._multiply(self.gate_up, index, first, x, blocks, top_k, pairs)
        middle, groups, rows = may_process_input(
            self.down.config, gate_up, activation_type="binary_split", activation_impl=self.activation
        )
        if second["block_shape"][0] != first["block_shape"][0]:
            blocks = blocks_of(route.experts, self.experts, second["block_shape"][0])
        scale = groups if self.down.config.input_quant_mode.has_group_scale else rows
        outputs = self._multiply(self.down, index, second, middle, blocks, 1, pairs, input_scale=scale)
        return weighted_sum(outputs.view(tokens, top_k, -1), route.weights)

    def _multiply(self, product, index, tuning, x, blocks, top_k, pairs, **more):
        config = product.config
        width = config.shape_n - config.pad_shape_n
        outputs = torch.empty(pairs, width, dtype=torch.bfloat16, device=x.device)
        humming_forward(
            config,
            inputs=x,
            **product.tensors[index],
            outputs=outputs,
            sorted_ids=blocks.pairs,
            expert_ids=blocks.experts,
            num_tokens_padded=blocks.rows,
            locks=self.locks,
            top_k=top_k,
            valid_shape_m=pairs,
            compute_config=_COMPUTE,
            tuning_config=tuning,
            **more,
        )
        return outputs


def _product(matrix: StoredMatrix, bias: torch.Tensor | None, sets: int, fp8: bool) -> _Product:
    schema, tensors = _stored(matrix)
    if bias is not None:
        tensors["bias"] = bias
    experts, rows, columns = matrix.shape
    config, transformed = prepare_and_transform_humming_tensors(
        tensors,
        shape_n=rows,
        shape_k=columns,
        weight_schema=schema,
        input_schema=HummingInputSchema(a_dtype="float8e4m3", input_scale_group_size=128) if fp8 else None,
        num_experts=experts,
        pad_n_to_multiple=_ROWS,
        pad_k_to_multiple=_COLUMNS,
        has_bias=bias is not None,
        torch_dtype=torch.bfloat16,
        device=matrix.parts["data"].device,
    )
    first = {name: tensor for name, tensor in transformed.items() if tensor is not None}
    copies = ({name: tensor.clone() for name, tensor in first.items()} for _ in range(sets - 1))
    return _Product(config, [first, *copies])


def _stored(matrix: StoredMatrix) -> tuple[HummingWeightSchema, dict[str, torch.Tensor]]:
    parts = matrix.parts
    tensors = {"weight": parts["data"].view(torch.int32), "weight_scale": parts["scale"]}
    match matrix.format:
        case Nvfp4():
            tensors["weight_scale_2"] = parts["row_scale"][:, 0, 0].clone()
            options = {"b_dtype": "float4e2m1", "bs_dtype": "float8e4m3", "weight_scale_group_size": 16}
            options["weight_scale_2_type"] = "tensor"
        case Mxfp4():
            tensors["weight_scale"] = parts["scale"].view(torch.float8_e8m0fnu)
            options = {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": 32}
        case IntGroup(bits=4, zero_point=False, scale_dtype=torch.bfloat16, group=group):
            options = {"b_dtype": "uint4", "bs_dtype": "bfloat16", "weight_scale_group_size": group}
        case Fp8(block_rows=128, block_columns=128):
            options = {"b_dtype": "float8e4m3", "weight_scale_group_size": 128}
            options["weight_scale_group_size_n"] = 128
        case other:
            raise ValueError(f"Humming is not given {other.name} here")
    return HummingWeightSchema(**options), tensors


def _expression(activation: Activation) -> str:
    """C++ of gate a and up b."""
    match activation:
        case Silu():
            return "a / (1.f + expf(-a)) * b"
        case ClampedSwiglu(limit=limit, alpha=alpha):
            gate = f"fminf(a, {limit}f)"
            up = f"(fmaxf(fminf(b, {limit}f), -{limit}f) + 1.f)"
            return f"{gate} / (1.f + expf(-{alpha}f * {gate})) * {up}"
    raise ValueError(f"Humming is not given {activation} here")
