"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), computed on the latents as they are cached."""

from dataclasses import dataclass

import torch

from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs, KvSpec
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import Linear, RmsNorm
from moebius_worker.engine.models.parameters import Matrix, Shard, Slots

# Of the norms of latents, whatever the config says of the others.
_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """`q_rank`: the size of the latent that queries come from; None: they come from the input.

    A head's query and key are `nope_dim` numbers without position and `rope_dim` with, its value `value_dim`.
    """

    hidden_size: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool


class LatentAttention(Layer):
    """Of each position one latent and one turned key are kept, for all heads together.

    A head's keys are `W_k latent`: `q (W_k latent)` is `(q W_k) latent`, and the weighted sum of `W_v latent`
    is `W_v` times the weighted sum of latents. So no key and no value of a head is ever computed.
    """

    def __init__(self, config: LatentConfig, rotary: Rotary, caches: CacheSpecs) -> None:
        self.config, self.rotary = config, rotary
        queries = config.num_heads * (config.nope_dim + config.rope_dim)
        self.q_down: Linear | None = None
        if config.q_rank is None:
            self.q_up = Linear(config.hidden_size, {"q_proj": queries}, shard=Shard.COLUMN)
        else:
            self.q_down = Linear(config.hidden_size, {"q_a_proj": config.q_rank}, bias=config.bias)
            self.q_norm = RmsNorm(config.q_rank, _NORM_EPS)
            self.q_up = Linear(config.q_rank, {"q_b_proj": queries}, shard=Shard.COLUMN)
        self.kv_down = Linear(
            config.hidden_size, {"kv_a_proj_with_mqa": config.kv_rank + config.rope_dim}, bias=config.bias
        )
        self.kv_norm = RmsNorm(config.kv_rank, _NORM_EPS)
        # Read head by head, not as one product.
        rows = config.num_heads * (config.nope_dim + config.value_dim)
        self.kv_up = Matrix({"kv_b_proj": rows}, config.kv_rank, shard=Shard.COLUMN, plain=True)
        self.out = Linear(
            config.num_heads * config.value_dim,
            {"o_proj": config.hidden_size},
            bias=config.bias,
            shard=Shard.ROW,
        )
        kept = config.kv_rank + config.rope_dim
        self.cache = caches.add(KvSpec(1, kept, config.kv_rank, values_in_keys=True))

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        config = self.config
        latent = x if self.q_down is None else self.q_norm(self.q_down(x))
        q = self.q_up(latent).unflatten(-1, (-1, config.nope_dim + config.rope_dim))
        q_nope, q_rope = q.split([config.nope_dim, config.rope_dim], dim=-1)
        kv, k_rope = self.kv_down(x).split([config.kv_rank, config.rope_dim], dim=-1)

        angles = context.angles(self.rotary)
        k_rope = self.ops.apply_rotary(k_rope.unsqueeze(1), angles).squeeze(1)
        k = torch.cat((self.kv_norm(kv), k_rope), dim=-1)
        pages, plan = context.kv(self.cache)
        faults = self.ops.write_kv(k.unsqueeze(1), None, pages, plan)

        up = self.kv_up.data.unflatten(0, (-1, config.nope_dim + config.value_dim))
        to_keys, to_values = up.split([config.nope_dim, config.value_dim], dim=1)
        q_nope = torch.einsum("thd,hdr->thr", q_nope, to_keys)
        q = torch.cat((q_nope, self.ops.apply_rotary(q_rope, angles)), dim=-1)
        y = self.ops.paged_attention(q, pages, plan, scale=config.scale)
        return self.out(torch.einsum("thr,hdr->thd", y, to_values).flatten(1)) + faults[:, None]

    def slots(self, prefix: str) -> Slots:
        slots = self.q_up.slots(prefix) | self.kv_down.slots(prefix) | self.out.slots(prefix)
        slots |= self.kv_norm.slots(f"{prefix}.kv_a_layernorm")
        slots[f"{prefix}.kv_b_proj.weight"] = self.kv_up.slot("kv_b_proj")
        if self.q_down is not None:
            slots |= self.q_down.slots(prefix) | self.q_norm.slots(f"{prefix}.q_a_layernorm")
        return slots
