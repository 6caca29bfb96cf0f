"""Layers that families share. Each names its parameters as Hugging Face checkpoints do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from moebius_kernels.activations import SILU, Activation
from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.device_plan import DeviceAttentionPlan
from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs, KvSpec
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.parameters import Matrix, Shard, Slots, Vector
from moebius_worker.engine.models.residual import Residual


class RmsNorm(Layer):
    """Over the last dimension. `offset`: added to the weight, for families whose weights are about 0."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, shard: Shard = Shard.NONE) -> None:
        self.weight = Vector(size, shard=shard)
        self.eps, self.offset = eps, offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x, self.weight.data, self.eps, offset=self.offset)

    def of_sum(self, residual: Residual) -> tuple[torch.Tensor, torch.Tensor]:
        """The total, and its norm."""
        x, y = residual.x, residual.y
        if y is None:
            return x, self(x)
        return self.ops.add_rms_norm(y, x, self.weight.data, self.eps, offset=self.offset)

    def slots(self, prefix: str) -> Slots:
        return {f"{prefix}.weight": self.weight.slot()}


class Linear(Layer):
    """Projections of one input, stacked and computed at once: [..., inputs] -> [..., sum of outputs]."""

    def __init__(
        self, inputs: int, outputs: Mapping[str, int], *, bias: bool = False, shard: Shard = Shard.NONE
    ) -> None:
        self.weight = Matrix(outputs, inputs, shard=shard)
        # The bias of a projection whose inputs are divided is added once, to the sum.
        own = shard if shard is Shard.COLUMN else Shard.NONE
        self.bias = Vector(sum(outputs.values()), parts=outputs, shard=own) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(x, self.weight.blocks, None if self.bias is None else self.bias.data)

    def slots(self, prefix: str) -> Slots:
        """`prefix` and the name of each projection, weight and bias."""
        slots = {f"{prefix}.{part}.weight": self.weight.slot(part) for part in self.weight.parts}
        if self.bias is not None:
            slots |= {f"{prefix}.{part}.bias": self.bias.slot(part) for part in self.bias.parts}
        return slots


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries are multiplied by 1 + beta * log(1 + position // context), as in Llama 4."""

    beta: float
    context: int

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions [T] -> factors [T, 1, 1], fp32."""
        return (1 + self.beta * (positions // self.context).float().log1p())[:, None, None]


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes and kinds of a grouped-query attention.

    `window`: a position sees itself and the `window - 1` before it; None: all. `qk_norm`: RMS norms of
    queries and keys before they are turned, over each head ("head") or over all heads together ("full").
    `scale`: None for 1 / sqrt(head_dim). `sinks`: a logit for each head that joins its softmax and is
    dropped. `output_gate`: q_proj gives, head by head, the query and then a gate of the head's output.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    norm_offset: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    output_gate: bool = False
    temperature: Temperature | None = None


class Attention(Layer):
    """Grouped-query attention with rotary positions (none if `rotary` is None) over paged keys and values."""

    def __init__(self, config: AttentionConfig, rotary: Rotary | None, caches: CacheSpecs) -> None:
        self.config, self.rotary = config, rotary
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(
            config.hidden_size,
            {"q_proj": 2 * queries if config.output_gate else queries, "k_proj": keys, "v_proj": keys},
            bias=config.qkv_bias,
            shard=Shard.COLUMN,
        )
        self.out = Linear(queries, {"o_proj": config.hidden_size}, bias=config.output_bias, shard=Shard.ROW)
        self.norms: dict[str, RmsNorm] = {}
        if config.qk_norm is not None:
            full = config.qk_norm == "full"
            shard = Shard.COLUMN if full else Shard.NONE
            sizes = (queries, keys) if full else (config.head_dim,) * 2
            for name, size in zip(("q_norm", "k_norm"), sizes, strict=True):
                self.norms[name] = RmsNorm(size, config.norm_eps, offset=config.norm_offset, shard=shard)
        self.sinks = Vector(config.num_heads, shard=Shard.COLUMN) if config.sinks else None
        self.cache = caches.add(KvSpec(config.num_kv_heads, config.head_dim, config.head_dim, config.window))

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        return self.attend(x, context, context.kv(self.cache)[1])

    def attend(
        self, x: torch.Tensor, context: StepContext, plan: AttentionPlan | DeviceAttentionPlan
    ) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]; `plan` says what each row sees."""
        config = self.config
        q, k, v = self.qkv(x).split(list(self.qkv.weight.parts.values()), dim=-1)
        gate = None
        if config.output_gate:
            q, gate = (half.flatten(1) for half in q.unflatten(-1, (config.num_heads, 2, -1)).unbind(-2))
        v = v.unflatten(-1, (config.num_kv_heads, -1))
        # A row whose keys or values could not be kept as they are is NaN from here on: the runner finds it.
        q = self._place(q, k, v, context, plan)
        if config.temperature is not None:
            q = (q * config.temperature(context.positions)).to(q.dtype)
        pages, _ = context.kv(self.cache)
        sinks = None if self.sinks is None else self.sinks.data
        y = self.ops.paged_attention(q, pages, plan, scale=config.scale, softcap=config.softcap, sinks=sinks)
        return self.out(y.flatten(1) if gate is None else y.flatten(1) * gate.sigmoid())

    def slots(self, prefix: str) -> Slots:
        slots = self.qkv.slots(prefix) | self.out.slots(prefix)
        for name, norm in self.norms.items():
            slots |= norm.slots(f"{prefix}.{name}")
        if self.sinks is not None:
            slots[f"{prefix}.sinks"] = self.sinks.slot()
        return slots

    def _place(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: StepContext,
        plan: AttentionPlan | DeviceAttentionPlan,
    ) -> torch.Tensor:
        """The queries as attention takes them [T, heads, D]; keys and values are in their pages."""
        config = self.config
        pages, _ = context.kv(self.cache)
        if config.qk_norm == "full":
            q, k = self.norms["q_norm"](q), self.norms["k_norm"](k)
        q, k = q.unflatten(-1, (config.num_heads, -1)), k.unflatten(-1, (config.num_kv_heads, -1))
        if self.rotary is None:
            if config.qk_norm == "head":
                q, k = self.norms["q_norm"](q), self.norms["k_norm"](k)
            return q + self.ops.write_kv(k, v, pages, plan)[:, None, None]
        norms: dict[str, Any] = {}
        if config.qk_norm == "head":
            norms = {f"{name[0]}_weight": norm.weight.data for name, norm in self.norms.items()}
            norms |= {"eps": config.norm_eps, "offset": config.norm_offset}
        return self.ops.rotate_and_write_kv(q, k, v, context.angles(self.rotary), pages, plan, **norms)


class GatedMlp(Layer):
    """The feed-forward network of dense layers."""

    def __init__(self, hidden: int, inner: int, *, bias: bool = False, activation: Activation = SILU) -> None:
        self.activation = activation
        self.gate_up = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, bias=bias, shard=Shard.COLUMN)
        self.down = Linear(inner, {"down_proj": hidden}, bias=bias, shard=Shard.ROW)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.ops.gated(self.gate_up(x), self.activation))

    def slots(self, prefix: str) -> Slots:
        return self.gate_up.slots(prefix) | self.down.slots(prefix)
