"""Layers that families share. Each names its parameters as Hugging Face checkpoints do."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.paged_attention import paged_attention, write_kv
from moebius_kernels.rms_norm import rms_norm
from moebius_kernels.rotary import Angles, apply_rotary
from moebius_kernels.swiglu import swiglu
from moebius_worker.engine.models.config import DecoderConfig

# A parameter, or the part of a fused one, under its name in the checkpoint.
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Place:
    """Where parameters live and in which dtype. On the device "meta" a model has sizes but no memory."""

    device: torch.device
    dtype: torch.dtype

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class StepContext:
    """What the layers of one step have in common."""

    angles: Angles
    attention: AttentionPlan


class RmsNorm:
    def __init__(self, config: DecoderConfig, place: Place) -> None:
        self.weight = place.empty(config.hidden_size)
        self.eps = config.norm_eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

    def weights(self, prefix: str) -> Weights:
        return {f"{prefix}.weight": self.weight}


class Linear:
    """Projections of one input, stacked and computed at once: [..., inputs] -> [..., sum of outputs]."""

    def __init__(self, inputs: int, outputs: Mapping[str, int], place: Place, *, bias: bool = False) -> None:
        self.outputs = dict(outputs)
        total = sum(self.outputs.values())
        self.weight = place.empty(total, inputs)
        self.bias = place.empty(total) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def weights(self, prefix: str) -> Weights:
        """`prefix` and the name of each projection, weight and bias."""
        named: Weights = {}
        for kind, fused in (("weight", self.weight), ("bias", self.bias)):
            if fused is not None:
                parts = fused.split(list(self.outputs.values()))
                named |= {
                    f"{prefix}.{name}.{kind}": part for name, part in zip(self.outputs, parts, strict=True)
                }
        return named


class Attention:
    """Grouped-query attention with rotary positions over paged keys and values."""

    def __init__(self, config: DecoderConfig, place: Place) -> None:
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": queries, "k_proj": keys, "v_proj": keys},
            place,
            bias=config.attention_bias,
        )
        self.out = Linear(queries, {"o_proj": config.hidden_size}, place, bias=config.attention_bias)

    def __call__(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (self.num_heads + 2 * self.num_kv_heads, -1))
        rotated = apply_rotary(heads[:, : -self.num_kv_heads], context.angles)
        q, k = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        faults = write_kv(k, heads[:, -self.num_kv_heads :], keys, values, context.attention)
        # A row whose keys or values could not be kept as they are ends up as NaN, for the runner to find.
        return self.out(paged_attention(q, keys, values, context.attention).flatten(1)) + faults[:, None]

    def weights(self, prefix: str) -> Weights:
        return self.qkv.weights(prefix) | self.out.weights(prefix)


class SwigluMlp:
    """The feed-forward network of dense layers."""

    def __init__(self, config: DecoderConfig, place: Place) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, place, bias=bias)
        self.down = Linear(inner, {"down_proj": hidden}, place, bias=bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(self.gate_up(x)))

    def weights(self, prefix: str) -> Weights:
        return self.gate_up.weights(prefix) | self.down.weights(prefix)
