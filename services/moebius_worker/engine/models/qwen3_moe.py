"""Qwen3-MoE: Qwen3's attention; experts in all layers but those that the config makes dense."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import read_decoder_config, require
from moebius_worker.engine.models.layers import Attention
from moebius_worker.engine.models.moe import (
    FUSED_EXPERTS,
    MoeConfig,
    MoeDecoder,
    Routing,
    SparseMoe,
    num_experts,
)
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer, dense_mlp
from moebius_worker.engine.models.qwen2 import without_window
from moebius_worker.engine.weights.layout import Layout


class Qwen3MoeForCausalLM(MoeDecoder):
    LAYOUT: ClassVar[Layout] = Layout(stacks=FUSED_EXPERTS)

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        sizes = read_decoder_config(without_window(config), default_theta=10_000.0)
        moe = MoeConfig(
            hidden_size=sizes.hidden_size,
            inner=require(config, "moe_intermediate_size"),
            total=num_experts(config),
            per_token=require(config, "num_experts_per_tok"),
        )
        route = Routing(
            "topk_softmax",
            {"top_k": moe.per_token, "renormalise": bool(config.get("norm_topk_prob", False))},
        )
        dense = set(config.get("mlp_only_layers") or ())
        every = config.get("decoder_sparse_step") or 1
        rotary, caches = Rotary(sizes.rope, place.device), CacheSpecs()
        layers = []
        for index in range(sizes.num_layers):
            sparse = index not in dense and (index + 1) % every == 0
            attention = Attention(sizes.attention(qk_norm="head"), rotary, caches)
            mlp = SparseMoe(moe, route) if sparse else dense_mlp(sizes)
            layers.append(PreNormLayer(sizes, attention, mlp))
        super().__init__(sizes, moe, layers, caches, place)
