"""Hyper-connections: several residual streams, which a block reads mixed and is added to in parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import Linear
from moebius_worker.engine.models.parameters import Slots, Vector


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """`count` streams of `hidden_size`, side by side in a row; `rank`: of what mixes them."""

    hidden_size: int
    count: int
    rank: int
    norm_eps: float

    @property
    def width(self) -> int:
        return self.count * self.hidden_size


class StreamNorm(Layer):
    """An RMS norm of each stream with weights of its own, which are stored as their distance from 1."""

    def __init__(self, config: StreamsConfig) -> None:
        self.config = config
        self.weight = Vector(config.width)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        streams = x.float().unflatten(-1, (self.config.count, -1))
        normed = self.ops.rms_norm(streams, None, self.config.norm_eps).flatten(-2)
        return (normed * (1.0 + self.weight.data.float())).to(x.dtype)

    def slots(self, prefix: str) -> Slots:
        return {f"{prefix}.weight": self.weight.slot()}


class StreamMixer(Layer):
    """One row of the streams', each number a mean over the streams with weights between 0 and 1.

    `beside`: more projections of the normed streams, by name, which `mix` returns.
    """

    def __init__(self, config: StreamsConfig, beside: Mapping[str, int] | None = None) -> None:
        self.config = config
        self.norm = StreamNorm(config)
        self.down = Linear(config.width, {"input_mix_weight_down": config.rank, **(beside or {})})
        self.up = Linear(config.rank, {"input_mix_weight_up": config.width})

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, streams * hidden] -> [T, hidden]"""
        return self.mix(x)[0]

    def mix(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, streams * hidden] -> the mixed row [T, hidden] and the other projections, / streams."""
        config = self.config
        normed = self.norm(x)
        low, beside = (self.down(normed) / config.count).tensor_split([config.rank], dim=-1)
        weights = self.up(F.silu(low)).sigmoid()
        return (weights * normed).unflatten(-1, (config.count, -1)).mean(dim=-2), beside

    def slots(self, prefix: str) -> Slots:
        return self.norm.slots(f"{prefix}.hc_norm") | self.down.slots(prefix) | self.up.slots(prefix)


class HyperConnection(StreamMixer):
    """Around a block: what it makes of the mixed row is added to each stream, times between 0 and 2."""

    def __init__(self, config: StreamsConfig) -> None:
        super().__init__(config, {"block_inject_weight": config.count})

    def around(self, x: torch.Tensor, block: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """x [T, streams * hidden]; `block` [T, hidden] -> [T, hidden]."""
        mixed, parts = self.mix(x)
        parts = 2 * parts.sigmoid()
        return x + (parts.unsqueeze(-1) * block(mixed).unsqueeze(-2)).flatten(-2)
