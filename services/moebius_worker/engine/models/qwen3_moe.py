"""Qwen3-MoE: Qwen3's attention; experts in all layers but those that the config makes dense."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import read_decoder_config
from moebius_worker.engine.models.layers import Attention
from moebius_worker.engine.models.moe import (
    FUSED_EXPERTS,
    MoeDecoder,
    Routing,
    SparseMoe,
    read_experts,
    sparse_layers,
)
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer, dense_mlp
from moebius_worker.engine.models.qwen2 import without_window
from moebius_worker.engine.weights.layout import Layout


class Qwen3MoeForCausalLM(MoeDecoder):
    LAYOUT: ClassVar[Layout] = Layout(stacks=FUSED_EXPERTS)

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        sizes = read_decoder_config(without_window(config), default_theta=10_000.0)
        moe = read_experts(config, sizes)
        route = Routing(
            "topk_softmax",
            {"top_k": moe.per_token, "renormalise": bool(config.get("norm_topk_prob", False))},
        )
        rotary, caches = Rotary(sizes.rope, place.device), CacheSpecs()
        layers = []
        for sparse in sparse_layers(config, sizes.num_layers):
            attention = Attention(sizes.attention(qk_norm="head"), rotary, caches)
            mlp = SparseMoe(moe, route) if sparse else dense_mlp(sizes)
            layers.append(PreNormLayer(sizes, attention, mlp))
        super().__init__(sizes, moe, layers, caches, place)
