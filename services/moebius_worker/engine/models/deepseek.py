"""DeepSeek-V3, in whose form Kimi K2 is published too, and V2: latent attention, and experts in groups."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary, YarnScaling, yarn_magnitude
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import DecoderConfig, read_decoder_config, require
from moebius_worker.engine.models.deepseek_moe import MtpMoeDecoder, deepseek_mlps, num_mtp_layers
from moebius_worker.engine.models.latent_attention import LatentAttention, LatentConfig
from moebius_worker.engine.models.moe import FUSED_EXPERTS
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer
from moebius_worker.engine.models.rope import rope_parameters
from moebius_worker.engine.weights.layout import Layout


class DeepseekV3ForCausalLM(MtpMoeDecoder):
    LAYOUT: ClassVar[Layout] = Layout(stacks=FUSED_EXPERTS)

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        # Of a head's numbers only these turn.
        config = {**config, "head_dim": require(config, "qk_rope_head_dim")}
        sizes = read_decoder_config(config, default_theta=10_000.0)
        latent = _latent_config(config, sizes)
        interleaved = config.get("rope_interleave", True)
        rotary = Rotary(replace(sizes.rope, interleaved=interleaved), place.device)
        moe, mlps = deepseek_mlps(config, sizes, dense=3)
        caches = CacheSpecs()
        layers = [PreNormLayer(sizes, LatentAttention(latent, rotary, caches), mlp) for mlp in mlps]
        super().__init__(
            sizes,
            moe,
            layers,
            caches,
            place,
            mtp_layers=num_mtp_layers(config),
            # Queries, turned and not, and what attention gives, are as wide as latents.
            row_elements=3 * latent.num_heads * (latent.kv_rank + latent.rope_dim),
        )


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """Experts by softmax; otherwise as V3."""

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        defaults = {
            "first_k_dense_replace": 0,
            "scoring_func": "softmax",
            "topk_method": "greedy",
            "norm_topk_prob": False,
        }
        super().__init__({**defaults, **config}, place)


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
