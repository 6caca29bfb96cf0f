"""OpenAI's Triton experts for gpt-oss's MXFP4, as vLLM 0.33 carries them (`third_party/triton_kernels`).

On Hopper they are what it takes for this model. Their routing, which chooses the experts as well, is made
before anything is timed.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from moebius_kernels.activations import ClampedSwiglu
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.router import Route


class Mxfp4Experts:
    """gpt-oss's activation only."""

    def __init__(self, layer: ExpertWeights, activation: ClampedSwiglu, sets: int, package: Path) -> None:
        sys.path.insert(0, str(package / "vllm/third_party"))
        from triton_kernels import matmul_ogs, routing, swiglu
        from triton_kernels.matmul_ogs_details import opt_flags

        # As vLLM has it on Hopper.
        opt_flags.update_opt_flags_constraints({"split_k": 1})
        self.module, self.routing = matmul_ogs, routing
        specs = matmul_ogs.FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit"))
        self.activation = matmul_ogs.FusedActivation(specs, (activation.alpha, activation.limit), 2)
        assert layer.gate_up_bias is not None
        assert layer.down_bias is not None
        # Gate and up in turns.
        order = torch.arange(layer.gate_up[0].shape[1], device=layer.gate_up_bias.device)
        order = order.view(2, -1).T.flatten()
        self.biases = layer.gate_up_bias[:, order].float(), layer.down_bias.float()
        self.weights = [
            (self._weights(layer.gate_up[0], order), self._weights(layer.down, None)) for _ in range(sets)
        ]
        self.experts = layer.num_slots
        self._routed: dict[int, Any] = {}

    def __call__(self, x: torch.Tensor, route: Route, index: int) -> torch.Tensor:
        data, gather, scatter = self._routing(route)
        (first, first_config), (second, second_config) = self.weights[index]
        middle = self.module.matmul_ogs(
            x,
            first,
            self.biases[0],
            data,
            gather_indx=gather,
            precision_config=first_config,
            fused_activation=self.activation,
        )
        y: torch.Tensor = self.module.matmul_ogs(
            middle,
            second,
            self.biases[1],
            data,
            scatter_indx=scatter,
            precision_config=second_config,
            gammas=data.gate_scal,
        )
        return y

    def _routing(self, route: Route) -> Any:
        address = route.experts.data_ptr()
        if address not in self._routed:
            logits = torch.full((len(route.experts), self.experts), -1e4, device=route.experts.device)
            logits.scatter_(1, route.experts, route.weights.log())
            self._routed[address] = self.routing.routing(logits.bfloat16(), route.experts.shape[1])
        return self._routed[address]

    def _weights(self, matrix: StoredMatrix, order: torch.Tensor | None) -> tuple[Any, Any]:
        from triton_kernels.numerics import InFlexData
        from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
        from triton_kernels.tensor_details import layout

        data, scale = matrix.parts["data"], matrix.parts["scale"]
        if order is not None:
            data, scale = data[:, order], scale[:, order]
        scale = F.pad(scale, (0, -scale.shape[-1] % 4))
        form, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        codes = wrap_torch_tensor(data.transpose(-2, -1), dtype=FP4)
        codes = convert_layout(codes, form, **options)
        form, options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
        factors = convert_layout(wrap_torch_tensor(scale.transpose(-2, -1)), form, **options)
        flex = self.module.FlexCtx(rhs_data=InFlexData())
        return codes, self.module.PrecisionConfig(weight_scale=factors, flex_ctx=flex)
