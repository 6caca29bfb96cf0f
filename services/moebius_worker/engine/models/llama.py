"""Llama: a dense decoder. Also what others publish in its form, such as SmolLM2 and Mistral."""

from collections.abc import Mapping
from typing import Any

import torch

from moebius_worker.engine.models.config import DecoderConfig, read_decoder_config
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.layers import Attention, Place, RmsNorm, StepContext, SwigluMlp, Weights


class LlamaLayer:
    def __init__(self, config: DecoderConfig, place: Place) -> None:
        self.attention_norm = RmsNorm(config, place)
        self.attention = Attention(config, place)
        self.mlp_norm = RmsNorm(config, place)
        self.mlp = SwigluMlp(config, place)

    def __call__(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), keys, values, context)
        return x + self.mlp(self.mlp_norm(x))

    def weights(self, prefix: str) -> Weights:
        return (
            self.attention_norm.weights(f"{prefix}.input_layernorm")
            | self.attention.weights(f"{prefix}.self_attn")
            | self.mlp_norm.weights(f"{prefix}.post_attention_layernorm")
            | self.mlp.weights(f"{prefix}.mlp")
        )


class LlamaForCausalLM(Decoder):
    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        sizes = read_decoder_config(config, default_theta=10_000.0)
        super().__init__(sizes, [LlamaLayer(sizes, place) for _ in range(sizes.num_layers)], place)


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window, unless the config says that there is none."""

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        super().__init__({"sliding_window": 4096, **config}, place)
