"""OLMoE: norms over all heads of queries and keys together; the weights of the chosen experts as they are."""

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
)
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer
from moebius_worker.engine.weights.layout import Layout


class OlmoeForCausalLM(MoeDecoder):
    LAYOUT: ClassVar[Layout] = Layout(stacks=FUSED_EXPERTS)

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        sizes = read_decoder_config(config, default_theta=10_000.0)
        moe = read_experts(config, sizes, inner=sizes.intermediate_size)
        route = Routing(
            "topk_softmax",
            {"top_k": moe.per_token, "renormalise": bool(config.get("norm_topk_prob", False))},
        )
        rotary, caches = Rotary(sizes.rope, place.device), CacheSpecs()
        layers = [
            PreNormLayer(
                sizes, Attention(sizes.attention(qk_norm="full"), rotary, caches), SparseMoe(moe, route)
            )
            for _ in range(sizes.num_layers)
        ]
        super().__init__(sizes, moe, layers, caches, place)
