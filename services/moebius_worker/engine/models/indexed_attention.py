"""Attention that looks at a budget of tokens: an indexer of few small heads selects blocks of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.block_selection import select_blocks
from moebius_kernels.rotary import Rotary
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs, KvSpec
from moebius_worker.engine.models.config import DecoderConfig, require
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import Attention, AttentionConfig, Linear, RmsNorm
from moebius_worker.engine.models.parameters import Slots


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """`block` tokens share a key; a row selects `top` blocks."""

    hidden_size: int
    heads: int
    head_dim: int
    block: int
    top: int
    norm_eps: float


def read_indexer(config: Mapping[str, Any], sizes: DecoderConfig) -> IndexerConfig:
    """Raises CheckpointError."""
    budget, block = require(config, "indexer_budget"), require(config, "indexer_compress_ratio")
    head_dim = require(config, "indexer_head_dim")
    if config.get("indexer_kv_heads") != 1:
        raise CheckpointError(f"indexer_kv_heads = {config.get('indexer_kv_heads')!r}; 1 is implemented.")
    if budget % block:
        raise CheckpointError(
            f"indexer_budget = {budget} is no multiple of indexer_compress_ratio = {block}."
        )
    if sizes.rope.rotary_dim > head_dim:
        raise CheckpointError(f"{sizes.rope.rotary_dim} numbers turn, but indexer_head_dim is {head_dim}.")
    return IndexerConfig(
        hidden_size=sizes.hidden_size,
        heads=require(config, "indexer_n_heads"),
        head_dim=head_dim,
        block=block,
        top=budget // block,
        norm_eps=sizes.norm_eps,
    )


class Indexer(Layer):
    """Keeps a key of each position as it is projected: norm and rotation are of the averages of blocks."""

    # What blocks there are to choose from decides the host.
    ASKS_HOST = True

    def __init__(self, config: IndexerConfig, rotary: Rotary, caches: CacheSpecs) -> None:
        self.config, self.rotary = config, rotary
        width = (config.heads + 1) * config.head_dim
        self.inputs = Linear(config.hidden_size, {"index_qk_proj": width})
        self.query_norm = RmsNorm(config.head_dim, config.norm_eps, offset=1.0)
        self.key_norm = RmsNorm(config.head_dim, config.norm_eps, offset=1.0)
        self.cache = caches.add(KvSpec(1, config.head_dim, config.head_dim, values_in_keys=True))

    def __call__(self, x: torch.Tensor, context: StepContext) -> tuple[AttentionPlan, torch.Tensor]:
        """What each row of x [T, hidden] sees, and [T]: NaN for a row whose key could not be kept, else 0."""
        config = self.config
        heads = self.inputs(x).unflatten(-1, (config.heads + 1, -1))
        q, key = heads.split([config.heads, 1], dim=1)
        pages, plan = context.kv(self.cache)
        faults = self.ops.write_kv(key, None, pages, plan)
        q = self.ops.apply_rotary(self.query_norm(q), context.angles(self.rotary))
        selected = select_blocks(
            q, context.positions, pages, plan, block=config.block, top=config.top, finish=self._finish
        )
        return selected, faults

    def slots(self, prefix: str) -> Slots:
        return (
            self.inputs.slots(prefix)
            | self.query_norm.slots(f"{prefix}.q_layernorm")
            | self.key_norm.slots(f"{prefix}.k_layernorm")
        )

    def _finish(self, averages: torch.Tensor) -> torch.Tensor:
        """Averages [..., blocks, D]: a block is where its first token is."""
        starts = torch.arange(averages.shape[-2], device=averages.device) * self.config.block
        # Operations take a block as they take a token: in a dimension of its own, and in front.
        blocks = averages.flatten(0, -2)
        angles = self.rotary(starts.repeat(len(blocks) // len(starts)))
        return self.ops.apply_rotary(self.key_norm(blocks).unsqueeze(1), angles).view_as(averages)


class IndexedAttention(Attention):
    def __init__(
        self, config: AttentionConfig, indexer: IndexerConfig, rotary: Rotary, caches: CacheSpecs
    ) -> None:
        super().__init__(config, rotary, caches)
        self.indexer = Indexer(indexer, rotary, caches)

    def __call__(self, x: torch.Tensor, context: StepContext) -> torch.Tensor:
        plan, faults = self.indexer(x, context)
        return self.attend(x, context, plan) + faults.unsqueeze(-1)

    def slots(self, prefix: str) -> Slots:
        return super().slots(prefix) | self.indexer.slots(f"{prefix}.indexer")
