"""Mixtral: Llama's attention, and a router that sends each token to a few of many feed-forward networks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moebius_kernels.experts import routed_experts
from moebius_kernels.router import topk_softmax
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.config import DecoderConfig, read_decoder_config, require
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.layers import Attention, Linear, Place, RmsNorm, StepContext, Weights


@dataclass(frozen=True, slots=True)
class Experts:
    """How many there are, and how many a token goes to."""

    total: int
    per_token: int


class SparseMoe:
    def __init__(self, config: DecoderConfig, experts: Experts, place: Place) -> None:
        self.experts = experts
        self.router = Linear(config.hidden_size, {"gate": experts.total}, place)
        # The gate's rows (w1) before those of the up projection (w3).
        self.gate_up = place.empty(experts.total, 2 * config.intermediate_size, config.hidden_size)
        self.down = place.empty(experts.total, config.hidden_size, config.intermediate_size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        route = topk_softmax(self.router(x), self.experts.per_token)
        return routed_experts(x, route, self.gate_up, self.down)

    def weights(self, prefix: str) -> Weights:
        named = self.router.weights(prefix)
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            w1, w3 = gate_up.chunk(2)
            for name, weight in (("w1", w1), ("w2", down), ("w3", w3)):
                named[f"{prefix}.experts.{index}.{name}.weight"] = weight
        return named


class MixtralLayer:
    def __init__(self, config: DecoderConfig, experts: Experts, place: Place) -> None:
        self.attention_norm = RmsNorm(config, place)
        self.attention = Attention(config, place)
        self.moe_norm = RmsNorm(config, place)
        self.moe = SparseMoe(config, experts, place)

    def __call__(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), keys, values, context)
        return x + self.moe(self.moe_norm(x))

    def weights(self, prefix: str) -> Weights:
        return (
            self.attention_norm.weights(f"{prefix}.input_layernorm")
            | self.attention.weights(f"{prefix}.self_attn")
            | self.moe_norm.weights(f"{prefix}.post_attention_layernorm")
            | self.moe.weights(f"{prefix}.block_sparse_moe")
        )


class MixtralForCausalLM(Decoder):
    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        sizes = read_decoder_config(config, default_theta=1_000_000.0)
        if sizes.mlp_bias:
            raise CheckpointError("The config says mlp_bias = True, which is not implemented for Mixtral.")
        experts = Experts(require(config, "num_local_experts"), require(config, "num_experts_per_tok"))
        if experts.per_token > experts.total:
            raise CheckpointError(
                f"num_experts_per_tok = {experts.per_token} is more than num_local_experts = {experts.total}."
            )
        layers = [MixtralLayer(sizes, experts, place) for _ in range(sizes.num_layers)]
        super().__init__(sizes, layers, place)
        self.experts = experts

    @property
    def row_elements(self) -> int:
        # A row is copied for each of its experts: in, out, and back in order in fp32.
        return super().row_elements + 4 * self.experts.per_token * self.config.hidden_size
