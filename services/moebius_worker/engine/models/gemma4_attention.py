"""Gemma 4's attention: norms on queries, keys and values; keys and values of fewer layers than there are."""

import torch

from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs, KvSpec
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.gemma4_config import LayerConfig
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import Linear, RmsNorm
from moebius_worker.engine.models.parameters import Shard, Slots


class Gemma4Attention(Layer):
    """`shared`: the cache of the earlier layer whose keys and values this one reads; None: it has its own."""

    def __init__(self, layer: LayerConfig, rotary: Rotary, caches: CacheSpecs, shared: int | None) -> None:
        self.config, self.rotary = layer.attention, rotary
        config = layer.attention
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        outputs = {"q_proj": queries}
        self.norms = {"q_norm": RmsNorm(config.head_dim, config.norm_eps)}
        if shared is None:
            outputs |= {"k_proj": keys} if layer.keys_are_values else {"k_proj": keys, "v_proj": keys}
            self.norms["k_norm"] = RmsNorm(config.head_dim, config.norm_eps)
            self.cache = caches.add(
                KvSpec(config.num_kv_heads, config.head_dim, config.head_dim, config.window)
            )
        else:
            self.cache = shared
        self.qkv = Linear(config.hidden_size, outputs, bias=config.qkv_bias, shard=Shard.COLUMN)
        self.out = Linear(queries, {"o_proj": config.hidden_size}, bias=config.output_bias, shard=Shard.ROW)

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        parts = self.qkv(x).split(list(self.qkv.weight.parts.values()), dim=-1)
        q, *kv = (part.unflatten(-1, (-1, self.config.head_dim)) for part in parts)
        angles = context.angles(self.rotary)
        pages, plan = context.kv(self.cache)
        if kv:
            # The last is the first where keys are values: then as they were before norm and rotation.
            v = self.ops.rms_norm(kv[-1], None, self.config.norm_eps)
            weights = {f"{name[0]}_weight": norm.weight.data for name, norm in self.norms.items()}
            q = self.ops.rotate_and_write_kv(
                q, kv[0], v, angles, pages, plan, **weights, eps=self.config.norm_eps
            )
        else:
            q = self.ops.apply_rotary(self.norms["q_norm"](q), angles)
        return self.out(self.ops.paged_attention(q, pages, plan, scale=self.config.scale).flatten(1))

    def slots(self, prefix: str) -> Slots:
        slots = self.qkv.slots(prefix) | self.out.slots(prefix)
        for name, norm in self.norms.items():
            slots |= norm.slots(f"{prefix}.{name}")
        return slots
