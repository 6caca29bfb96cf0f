"""MiniMax-M2: norms over all heads together, part of each head turns, and sigmoid-routed experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import read_decoder_config, require
from moebius_worker.engine.models.deepseek_moe import DeepseekMoe, MtpMoeDecoder, num_mtp_layers
from moebius_worker.engine.models.layers import Attention
from moebius_worker.engine.models.mixtral import MixtralForCausalLM, MixtralLayer
from moebius_worker.engine.models.moe import ExpertNames, Routing, read_experts
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.weights.layout import Layout

# What the released config says of parts that other MiniMax models have otherwise.
_ONLY = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "use_qk_norm": True,
    "use_routing_bias": True,
}


class MiniMaxM2ForCausalLM(MtpMoeDecoder):
    LAYOUT: ClassVar[Layout] = MixtralForCausalLM.LAYOUT

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        for key, only in _ONLY.items():
            if config.get(key, only) != only:
                raise CheckpointError(f"The config says {key} = {config[key]!r}; implemented is {only!r}.")
        if set(config.get("attn_type_list") or ()) - {1}:
            raise CheckpointError(
                "The config's attn_type_list has linear attention, which is not implemented."
            )
        if (turning := config.get("rotary_dim")) is not None:
            config = {"partial_rotary_factor": turning / require(config, "head_dim"), **config}
        sizes = read_decoder_config(config, default_theta=5_000_000.0, implements=("use_qk_norm",))
        moe = read_experts(config, sizes, inner=sizes.intermediate_size)
        route = Routing("sigmoid_topk", {"top_k": moe.per_token})
        rotary, caches = Rotary(sizes.rope, place.device), CacheSpecs()
        layers = [
            MixtralLayer(
                sizes,
                Attention(sizes.attention(qk_norm="full"), rotary, caches),
                DeepseekMoe(
                    moe, route, bias_name="e_score_correction_bias", names=ExpertNames("w1", "w3", "w2")
                ),
            )
            for _ in range(sizes.num_layers)
        ]
        super().__init__(sizes, moe, layers, caches, place, mtp_layers=num_mtp_layers(config))
