"""gpt-oss: every other layer sees a window, heads have sinks, and everything but the norms has biases."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moebius_kernels.activations import ClampedSwiglu
from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import FULL, SLIDING, read_decoder_config, read_layer_types, require
from moebius_worker.engine.models.layers import Attention
from moebius_worker.engine.models.moe import MoeDecoder, Routing, SparseMoe, read_experts
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer
from moebius_worker.engine.weights.layout import Layout, Stack

_DEFAULTS: Mapping[str, Any] = {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702}
_DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# What is not packed along the inputs is stored inputs first; OpenAI's blocks of 32 are not.
_TRANSPOSED = frozenset({"weight", "weight_scale"})


class GptOssForCausalLM(MoeDecoder):
    LAYOUT: ClassVar[Layout] = Layout(
        stacks=(
            Stack("experts.gate_up_proj", ("gate_proj", "up_proj"), True, _TRANSPOSED),
            Stack("experts.down_proj", ("down_proj",), False, _TRANSPOSED),
        )
    )

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        config = {**_DEFAULTS, **config}
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            config["rope_parameters"] = _DEFAULT_ROPE
        sizes = read_decoder_config(config, default_theta=150_000.0, implements=("layer_types",))
        activation = ClampedSwiglu(config["swiglu_limit"], config["swiglu_alpha"])
        moe = read_experts(config, sizes, inner=sizes.intermediate_size, bias=True, activation=activation)
        windows = {SLIDING: require(config, "sliding_window"), FULL: None}
        kinds = read_layer_types(config, (SLIDING, FULL))
        route = Routing("softmax_topk", {"top_k": moe.per_token})
        rotary, caches = Rotary(sizes.rope, place.device), CacheSpecs()
        layers = [
            PreNormLayer(
                sizes,
                Attention(sizes.attention(window=windows[kind], sinks=True), rotary, caches),
                SparseMoe(moe, route, router_name="router", router_bias=True),
            )
            for kind in kinds
        ]
        super().__init__(sizes, moe, layers, caches, place)
