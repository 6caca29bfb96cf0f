"""Mixtral: Llama's attention, and a router that sends each token to a few of many feed-forward networks."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import read_decoder_config
from moebius_worker.engine.models.layers import Attention
from moebius_worker.engine.models.moe import ExpertNames, MoeDecoder, Routing, SparseMoe, read_experts
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer
from moebius_worker.engine.weights.layout import Layout

_NAMES = ExpertNames("w1", "w3", "w2")


class MixtralLayer(PreNormLayer):
    mlp_name = "block_sparse_moe"


class MixtralForCausalLM(MoeDecoder):
    # Some tools for quantisation give the experts the names of other families.
    LAYOUT: ClassVar[Layout] = Layout(
        renames=(
            (r"(\.experts\.\d+)\.gate_proj\.", r"\1.w1."),
            (r"(\.experts\.\d+)\.down_proj\.", r"\1.w2."),
            (r"(\.experts\.\d+)\.up_proj\.", r"\1.w3."),
        )
    )

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        sizes = read_decoder_config(config, default_theta=1_000_000.0)
        if sizes.mlp_bias:
            raise CheckpointError("The config says mlp_bias = True, which is not implemented for Mixtral.")
        moe = read_experts(config, sizes, inner=sizes.intermediate_size)
        route = Routing("topk_softmax", {"top_k": moe.per_token})
        rotary, caches = Rotary(sizes.rope, place.device), CacheSpecs()
        layers = [
            MixtralLayer(
                sizes, Attention(sizes.attention(), rotary, caches), SparseMoe(moe, route, names=_NAMES)
            )
            for _ in range(sizes.num_layers)
        ]
        super().__init__(sizes, moe, layers, caches, place)
