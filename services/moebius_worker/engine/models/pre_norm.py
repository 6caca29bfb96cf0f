"""The layer that most families have: attention, then a feed-forward network, each behind a norm."""

from typing import Protocol

import torch

from moebius_worker.engine.models.config import DecoderConfig
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import GatedMlp, RmsNorm
from moebius_worker.engine.models.parameters import Slots
from moebius_worker.engine.models.residual import Residual


class Mixer(Protocol):
    """What looks at the tokens before: attention, or its linear kinds. [T, hidden] -> [T, hidden]."""

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor: ...

    def slots(self, prefix: str) -> Slots: ...


class FeedForward(Protocol):
    """What a token goes through after attention: [T, hidden] -> [T, hidden]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def slots(self, prefix: str) -> Slots: ...


class PreNormLayer(Layer):
    """Attention, then a feed-forward network, the input of each normalised."""

    # What the checkpoints call the feed-forward network.
    mlp_name = "mlp"

    def __init__(
        self,
        config: DecoderConfig,
        attention: Mixer,
        mlp: FeedForward,
        *,
        attention_name: str = "self_attn",
        norm_offset: float = 0.0,
    ) -> None:
        self.attention_norm = RmsNorm(config.hidden_size, config.norm_eps, offset=norm_offset)
        self.attention, self.attention_name = attention, attention_name
        self.mlp_norm = RmsNorm(config.hidden_size, config.norm_eps, offset=norm_offset)
        self.mlp = mlp

    def __call__(self, residual: Residual, context: StepContext) -> Residual:
        x, normed = self.attention_norm.of_sum(residual)
        x, normed = self.mlp_norm.of_sum(Residual(x, self.attention(normed, context)))
        return Residual(x, self.mlp(normed))

    def slots(self, prefix: str) -> Slots:
        return (
            self.attention_norm.slots(f"{prefix}.input_layernorm")
            | self.attention.slots(f"{prefix}.{self.attention_name}")
            | self.mlp_norm.slots(f"{prefix}.post_attention_layernorm")
            | self.mlp.slots(f"{prefix}.{self.mlp_name}")
        )


def dense_mlp(config: DecoderConfig) -> GatedMlp:
    return GatedMlp(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
