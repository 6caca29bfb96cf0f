"""Routed experts as families share them: a router, and experts behind a store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.operations import Operations
from moebius_kernels.router import Route
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import DecoderConfig, require
from moebius_worker.engine.models.decoder import Decoder, DecoderLayer
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import Linear
from moebius_worker.engine.models.parameters import Matrix, Place, Shard, Slots, Vector
from moebius_worker.engine.weights.layout import Stack

# How most checkpoints hold all experts of a layer in one tensor, if they do.
FUSED_EXPERTS = (
    Stack("experts.gate_up_proj", ("gate_proj", "up_proj")),
    Stack("experts.down_proj", ("down_proj",)),
)


def num_experts(config: Mapping[str, Any]) -> int:
    """Of a layer; configs differ in what they call it. Raises CheckpointError."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    key = next((key for key in keys if key in config), "num_experts")
    return int(require(config, key))


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a checkpoint calls the three matrices of an expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """`total` experts with `inner` neurons, of which a token goes to `per_token`."""

    hidden_size: int
    inner: int
    total: int
    per_token: int
    bias: bool = False
    activation: Activation = SILU

    def __post_init__(self) -> None:
        if self.per_token > self.total:
            raise CheckpointError(
                f"The config sends a token to {self.per_token} experts, but there are {self.total}."
            )


def read_experts(
    config: Mapping[str, Any], sizes: DecoderConfig, *, inner: int | None = None, **kinds: Any
) -> MoeConfig:
    """The experts of a config with the keys that most families have; `kinds` sets more fields of `MoeConfig`.

    `inner`: of families whose configs have no `moe_intermediate_size`. Raises CheckpointError.
    """
    return MoeConfig(
        hidden_size=sizes.hidden_size,
        inner=inner or require(config, "moe_intermediate_size"),
        total=num_experts(config),
        per_token=require(config, "num_experts_per_tok"),
        **kinds,
    )


def sparse_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have experts in Qwen3-MoE and Qwen3-Next: all but those that the config makes dense."""
    dense = set(config.get("mlp_only_layers") or ())
    every = config.get("decoder_sparse_step") or 1
    return [index not in dense and (index + 1) % every == 0 for index in range(num_layers)]


class ExpertStore(Protocol):
    """Where a layer's experts are. A cache may move them; kernels follow its table of slots."""

    def fetch(self, route: Route) -> ExpertWeights:
        """The weights, with every expert of `route` in its slot until the next call."""
        ...

    def slots(self, prefix: str) -> Slots: ...


class ResidentExperts:
    """All experts of a layer in the device's memory."""

    def __init__(self, config: MoeConfig, names: ExpertNames) -> None:
        hidden, inner, total = config.hidden_size, config.inner, config.total
        gate_up, down = {names.gate: inner, names.up: inner}, {names.down: hidden}
        self.gate_up = Matrix(gate_up, hidden, experts=total, shard=Shard.EXPERT)
        self.down = Matrix(down, inner, experts=total, shard=Shard.EXPERT)
        self.biases: list[Vector] = []
        if config.bias:
            self.biases = [
                Vector(sum(parts.values()), parts=parts, experts=total, shard=Shard.EXPERT)
                for parts in (gate_up, down)
            ]

    def fetch(self, route: Route) -> ExpertWeights:
        [down] = self.down.blocks
        return ExpertWeights(self.gate_up.blocks, down, *(bias.data for bias in self.biases))

    def slots(self, prefix: str) -> Slots:
        """`prefix`, the expert's number and the name of each projection."""
        owners: list[tuple[str, Matrix | Vector]] = [("weight", self.gate_up), ("weight", self.down)]
        owners += (("bias", bias) for bias in self.biases)
        return {
            f"{prefix}.{expert}.{part}.{kind}": owner.slot(part, expert)
            for kind, owner in owners
            for expert in range(owner.experts or 0)
            for part in owner.parts
        }


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are found: the router operation of this name, with these settings."""

    operation: Literal["topk_softmax", "softmax_topk", "sigmoid_topk"]
    settings: Mapping[str, Any]

    def __call__(self, ops: Operations, logits: torch.Tensor, **more: torch.Tensor) -> Route:
        """The router's logits [T, E] -> each token's experts. `more`: arguments that are parameters."""
        route: Route = getattr(ops, self.operation)(logits, **self.settings, **more)
        return route


class SparseMoe(Layer):
    """A router, `gate`, and the experts it sends tokens to: [T, H] -> [T, H]."""

    def __init__(
        self,
        config: MoeConfig,
        routing: Routing,
        *,
        names: ExpertNames | None = None,
        router_name: str = "gate",
        router_bias: bool = False,
    ) -> None:
        self.config, self.routing = config, routing
        self.router = Linear(config.hidden_size, {router_name: config.total}, bias=router_bias)
        self.experts: ExpertStore = ResidentExperts(config, names or ExpertNames())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        route = self.routing(self.ops, self.router(x))
        return self.ops.routed_experts(x, route, self.experts.fetch(route), self.config.activation)

    def slots(self, prefix: str) -> Slots:
        return self.router.slots(prefix) | self.experts.slots(f"{prefix}.experts")


class MoeDecoder(Decoder):
    """A decoder with routed experts of the sizes `moe` in some layers."""

    def __init__(
        self,
        config: DecoderConfig,
        moe: MoeConfig,
        layers: Sequence[DecoderLayer],
        caches: CacheSpecs,
        place: Place,
        **parts: Any,
    ) -> None:
        """`parts`: as of `Decoder`."""
        super().__init__(config, layers, caches, place, **parts)
        self.moe = moe

    @property
    def expert_share(self) -> float:
        return self.moe.per_token / self.moe.total

    @property
    def row_elements(self) -> int:
        # A row is copied for each of its experts: in, out, and back in order in fp32.
        return super().row_elements + 4 * self.moe.per_token * self.config.hidden_size
