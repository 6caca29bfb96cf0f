"""Llama: a dense decoder. Also what others publish in its form, such as SmolLM2 and Mistral."""

from collections.abc import Mapping
from typing import Any

from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import DecoderConfig, read_decoder_config
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.layers import Attention
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer, dense_mlp


class DenseDecoder(Decoder):
    """A decoder of dense layers that are alike; `kinds` sets fields of their `AttentionConfig`."""

    def __init__(self, sizes: DecoderConfig, place: Place, **kinds: Any) -> None:
        rotary, caches = Rotary(sizes.rope, place.device), CacheSpecs()
        layers = [
            PreNormLayer(sizes, Attention(sizes.attention(**kinds), rotary, caches), dense_mlp(sizes))
            for _ in range(sizes.num_layers)
        ]
        super().__init__(sizes, layers, caches, place)


class LlamaForCausalLM(DenseDecoder):
    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        super().__init__(read_decoder_config(config, default_theta=10_000.0), place)


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window, unless the config says that there is none."""

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        super().__init__({"sliding_window": 4096, **config}, place)
