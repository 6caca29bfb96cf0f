"""GLM-4.5 to 4.7: attention of which half turns, and DeepSeek-V3's experts."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import read_decoder_config
from moebius_worker.engine.models.layers import Attention
from moebius_worker.engine.models.moe import FUSED_EXPERTS
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer, dense_mlp
from moebius_worker.engine.models.sigmoid_moe import (
    MtpMoeDecoder,
    SigmoidMoe,
    deepseek_moe,
    num_mtp_layers,
)
from moebius_worker.engine.weights.layout import Layout


class Glm4MoeForCausalLM(MtpMoeDecoder):
    LAYOUT: ClassVar[Layout] = Layout(stacks=FUSED_EXPERTS)

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        config = {"partial_rotary_factor": 0.5, **config}
        sizes = read_decoder_config(config, default_theta=10_000.0, implements=("use_qk_norm",))
        moe, kinds = deepseek_moe(config, sizes)
        attention = sizes.attention(qk_norm="head" if config.get("use_qk_norm") else None, output_bias=False)
        dense, rotary, caches = (
            config.get("first_k_dense_replace", 1),
            Rotary(sizes.rope, place.device),
            CacheSpecs(),
        )
        layers = [
            PreNormLayer(
                sizes,
                Attention(attention, rotary, caches),
                dense_mlp(sizes) if index < dense else SigmoidMoe(moe, **kinds),
            )
            for index in range(sizes.num_layers)
        ]
        super().__init__(sizes, moe, layers, caches, place, mtp_layers=num_mtp_layers(config))
