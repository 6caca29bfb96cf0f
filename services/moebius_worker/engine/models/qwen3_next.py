"""Qwen3-Next: as Qwen3.5 with experts, but for packed projections and layers that may be dense."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import require
from moebius_worker.engine.models.gated_delta_net import PackedGatedDeltaNet, read_delta_net
from moebius_worker.engine.models.moe import MoeDecoder, read_experts, sparse_layers
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import FeedForward, dense_mlp
from moebius_worker.engine.models.qwen3_5 import LAYOUT, build_layers, read_sizes
from moebius_worker.engine.models.shared_expert import SharedExpertMoe
from moebius_worker.engine.weights.layout import Layout


class Qwen3NextForCausalLM(MoeDecoder):
    LAYOUT: ClassVar[Layout] = LAYOUT

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        sizes, caches = read_sizes(config), CacheSpecs()
        linear = read_delta_net(config, sizes)
        moe, shared = read_experts(config, sizes), require(config, "shared_expert_intermediate_size")
        sparse = sparse_layers(config, sizes.num_layers)
        renormalise = bool(config.get("norm_topk_prob", True))

        def mlp(index: int) -> FeedForward:
            return (
                SharedExpertMoe(moe, shared, renormalise=renormalise) if sparse[index] else dense_mlp(sizes)
            )

        layers = build_layers(config, sizes, caches, place, mlp, linear, PackedGatedDeltaNet)
        super().__init__(sizes, moe, layers, caches, place, norm_offset=1.0, row_elements=linear.row_elements)
