"""GLM-4.5 to 4.7: DeepSeek-V3's experts, with grouped-query attention, or with its attention too."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import read_decoder_config
from moebius_worker.engine.models.deepseek import DeepseekV3ForCausalLM
from moebius_worker.engine.models.deepseek_moe import MtpMoeDecoder, deepseek_mlps, num_mtp_layers
from moebius_worker.engine.models.layers import Attention
from moebius_worker.engine.models.moe import FUSED_EXPERTS
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer
from moebius_worker.engine.weights.layout import Layout


class Glm4MoeForCausalLM(MtpMoeDecoder):
    LAYOUT: ClassVar[Layout] = Layout(stacks=FUSED_EXPERTS)

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        config = {"partial_rotary_factor": 0.5, **config}
        sizes = read_decoder_config(config, default_theta=10_000.0, implements=("use_qk_norm",))
        moe, mlps = deepseek_mlps(config, sizes, dense=1)
        qk_norm = "head" if config.get("use_qk_norm") else None
        attention = sizes.attention(qk_norm=qk_norm, output_bias=False)
        rotary, caches = Rotary(sizes.rope, place.device), CacheSpecs()
        layers = [PreNormLayer(sizes, Attention(attention, rotary, caches), mlp) for mlp in mlps]
        super().__init__(sizes, moe, layers, caches, place, mtp_layers=num_mtp_layers(config))


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash."""

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        super().__init__({"first_k_dense_replace": 1, **config}, place)
