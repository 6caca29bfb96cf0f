"""The linear attention of Qwen3-Next and later: a short convolution, then the gated delta rule."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from moebius_kernels.gated_delta import CHUNK
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs, StateSpec
from moebius_worker.engine.models.config import DecoderConfig, require
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import Linear
from moebius_worker.engine.models.parameters import Slots, Vector

OutputGate = Literal["silu", "sigmoid"]


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Each key head is read by value_heads / key_heads value heads. `taps`: of the convolution."""

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm_eps: float
    output_gate: OutputGate

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values, which all go through the convolution."""
        return 2 * self.keys + self.values

    @property
    def row_elements(self) -> int:
        """How many numbers the layer holds for one row at the same time, roughly and at most."""
        # Of each chunk: its matrices between tokens, and both sides of its triangular system.
        chunks = self.value_heads * (4 * CHUNK + 3 * self.key_dim + 4 * self.value_dim)
        return 4 * self.channels + 2 * self.values + chunks


def read_delta_net(config: Mapping[str, Any], sizes: DecoderConfig) -> DeltaNetConfig:
    """Raises CheckpointError."""
    key_heads, value_heads = (require(config, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    if value_heads % key_heads:
        raise CheckpointError(
            f"linear_num_value_heads = {value_heads} is no multiple of linear_num_key_heads = {key_heads}."
        )
    gates: Mapping[str, OutputGate] = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
    gate = config.get("output_gate_type") or "silu"
    if gate not in gates:
        raise CheckpointError(
            f"The config says output_gate_type = {gate!r}; implemented are {', '.join(gates)}."
        )
    return DeltaNetConfig(
        hidden_size=sizes.hidden_size,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=require(config, "linear_key_head_dim"),
        value_dim=require(config, "linear_value_head_dim"),
        taps=require(config, "linear_conv_kernel_dim"),
        norm_eps=sizes.norm_eps,
        output_gate=gates[gate],
    )


class GatedDeltaNet(Layer):
    """Keeps no keys and values, but a state of a fixed size: [T, hidden] -> [T, hidden].

    Its projections are not divided among ranks: the rows of queries, keys and values are one tensor.
    """

    def __init__(self, config: DeltaNetConfig, caches: CacheSpecs) -> None:
        self.config = config
        self.inputs = self.projections()
        self.convolution = Vector(config.channels, config.taps)
        self.decay = Vector(config.value_heads, dtype=torch.float32)
        self.decay_bias = Vector(config.value_heads, dtype=torch.float32)
        self.norm = Vector(config.value_dim, dtype=torch.float32)
        self.out = Linear(config.values, {"out_proj": config.hidden_size})
        self.cache = caches.add(
            StateSpec(
                {
                    "convolution": (config.channels, config.taps - 1),
                    "memory": (config.value_heads, config.key_dim, config.value_dim),
                },
                {"memory": torch.float32},
            )
        )

    def projections(self) -> Linear:
        """Of what `project` makes its results."""
        config = self.config
        return Linear(
            config.hidden_size,
            {
                "in_proj_qkv": config.channels,
                "in_proj_z": config.values,
                "in_proj_b": config.value_heads,
                "in_proj_a": config.value_heads,
            },
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [T, hidden] -> queries, keys and values [T, channels], output gates [T, values], and what the
        learning rates and the decays [T, value heads] are made of."""
        return self.inputs(x).split(list(self.inputs.weight.parts.values()), dim=-1)

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        config = self.config
        qkv, z, b, a = self.project(x)
        states, plan = context.state(self.cache)
        qkv = self.ops.causal_conv1d(qkv, self.convolution.data, None, states["convolution"], plan, "silu")
        q, k, v = qkv.split([config.keys, config.keys, config.values], dim=-1)
        y = self.ops.gated_delta_rule(
            q.unflatten(-1, (config.key_heads, -1)),
            k.unflatten(-1, (config.key_heads, -1)),
            v.unflatten(-1, (config.value_heads, -1)),
            -self.decay.data.exp() * F.softplus(a.float() + self.decay_bias.data),
            b.float().sigmoid(),
            states["memory"],
            plan,
        )
        z = z.unflatten(-1, (config.value_heads, -1))
        y = self.ops.gated_rms_norm(y, z, self.norm.data, config.norm_eps, config.output_gate)
        return self.out(y.flatten(1))

    def slots(self, prefix: str) -> Slots:
        return (
            self.inputs.slots(prefix)
            | self.out.slots(prefix)
            | {
                f"{prefix}.conv1d.weight": self.convolution.slot(),
                f"{prefix}.A_log": self.decay.slot(),
                f"{prefix}.dt_bias": self.decay_bias.slot(),
                f"{prefix}.norm.weight": self.norm.slot(),
            }
        )


class PackedGatedDeltaNet(GatedDeltaNet):
    """Qwen3-Next's form: two projections, in which the rows of each key head lie together."""

    def projections(self) -> Linear:
        config = self.config
        return Linear(
            config.hidden_size,
            {"in_proj_qkvz": config.channels + config.values, "in_proj_ba": 2 * config.value_heads},
        )

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        config = self.config
        shared = config.value_heads // config.key_heads
        values = shared * config.value_dim
        qkvz, ba = super().project(x)
        q, k, v, z = qkvz.unflatten(-1, (config.key_heads, -1)).split(
            [config.key_dim, config.key_dim, values, values], dim=-1
        )
        b, a = ba.unflatten(-1, (config.key_heads, -1)).split(shared, dim=-1)
        qkv = torch.cat([part.flatten(1) for part in (q, k, v)], dim=-1)
        return qkv, z.flatten(1), b.flatten(1), a.flatten(1)
