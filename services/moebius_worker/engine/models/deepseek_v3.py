"""DeepSeek-V3: latent attention and sigmoid-routed experts. Kimi K2 is published in its form."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary, YarnScaling, yarn_magnitude
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import DecoderConfig, read_decoder_config, require
from moebius_worker.engine.models.latent_attention import LatentAttention, LatentConfig
from moebius_worker.engine.models.moe import FUSED_EXPERTS
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer, dense_mlp
from moebius_worker.engine.models.rope import rope_parameters
from moebius_worker.engine.models.sigmoid_moe import (
    MtpMoeDecoder,
    SigmoidMoe,
    deepseek_moe,
    num_mtp_layers,
)
from moebius_worker.engine.weights.layout import Layout


class DeepseekV3ForCausalLM(MtpMoeDecoder):
    LAYOUT: ClassVar[Layout] = Layout(stacks=FUSED_EXPERTS)

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        # Of a head's numbers only these turn.
        config = {**config, "head_dim": require(config, "qk_rope_head_dim")}
        sizes = read_decoder_config(config, default_theta=10_000.0)
        self.latent = _latent_config(config, sizes)
        interleaved = config.get("rope_interleave", True)
        rotary = Rotary(replace(sizes.rope, interleaved=interleaved), place.device)
        moe, kinds = deepseek_moe(config, sizes)
        dense, caches = config.get("first_k_dense_replace", 3), CacheSpecs()
        layers = [
            PreNormLayer(
                sizes,
                LatentAttention(self.latent, rotary, caches),
                dense_mlp(sizes) if index < dense else SigmoidMoe(moe, **kinds),
            )
            for index in range(sizes.num_layers)
        ]
        super().__init__(sizes, moe, layers, caches, place, mtp_layers=num_mtp_layers(config))

    @property
    def row_elements(self) -> int:
        return super().row_elements + 3 * self.latent.num_heads * (self.latent.kv_rank + self.latent.rope_dim)


def _latent_config(config: Mapping[str, Any], sizes: DecoderConfig) -> LatentConfig:
    nope, rope = require(config, "qk_nope_head_dim"), require(config, "qk_rope_head_dim")
    scale = (nope + rope) ** -0.5
    mscale = rope_parameters(config).get("mscale_all_dim")
    if mscale and isinstance(sizes.rope.scaling, YarnScaling):
        scale *= yarn_magnitude(sizes.rope.scaling.factor, mscale) ** 2
    return LatentConfig(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        q_rank=require(config, "q_lora_rank") if config.get("q_lora_rank") is not None else None,
        kv_rank=require(config, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=require(config, "v_head_dim"),
        scale=scale,
        bias=sizes.attention_bias,
    )
