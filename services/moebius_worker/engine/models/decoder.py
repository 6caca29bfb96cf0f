"""What decoder families have around their layers: embedding, final norm, head, names of all weights."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from moebius_kernels.attention_plan import AttentionPlan
from moebius_kernels.rotary import Rotary
from moebius_worker.engine.kv_tensors import KvShape, KvTensors
from moebius_worker.engine.models.config import DecoderConfig
from moebius_worker.engine.models.layers import Place, RmsNorm, StepContext, Weights


class DecoderLayer(Protocol):
    def __call__(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: StepContext
    ) -> torch.Tensor: ...

    def weights(self, prefix: str) -> Weights: ...


class Decoder:
    """A causal language model: a family is this with its own layers."""

    def __init__(self, config: DecoderConfig, layers: Sequence[DecoderLayer], place: Place) -> None:
        self.config = config
        self.embedding = place.empty(config.vocab_size, config.hidden_size)
        self.layers = layers
        self.norm = RmsNorm(config, place)
        self.head = self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)
        self.rotary = Rotary(config.rope, place.device)

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)

    @property
    def row_elements(self) -> int:
        """How many numbers a layer holds for one row of a step at the same time, roughly and at most."""
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        return (
            4 * self.config.hidden_size + 3 * heads * self.config.head_dim + 3 * self.config.intermediate_size
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KvTensors,
        attention: AttentionPlan,
        progress: Callable[[], None],
    ) -> torch.Tensor:
        """One step: int64 [T] and int64 [T] -> hidden states [T, hidden]. Writes keys and values.

        `progress` is called after each layer.
        """
        context = StepContext(self.rotary(positions), attention)
        x = F.embedding(token_ids, self.embedding)
        for layer, keys, values in zip(self.layers, kv.keys, kv.values, strict=True):
            x = layer(x, keys, values, context)
            progress()
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden] -> fp32 [N, vocab]."""
        return F.linear(self.norm(hidden), self.head).float()

    def weight_map(self) -> Weights:
        """Every parameter, or part of a fused one, under the name that Hugging Face checkpoints give it."""
        named = {"model.embed_tokens.weight": self.embedding} | self.norm.weights("model.norm")
        for index, layer in enumerate(self.layers):
            named |= layer.weights(f"model.layers.{index}")
        if not self.config.tie_word_embeddings:
            named["lm_head.weight"] = self.head
        return named

    def ignores(self, name: str) -> bool:
        """Tensors that hold nothing new: tied embeddings once more, and frequencies, which are computed."""
        tied = name == "lm_head.weight" and self.config.tie_word_embeddings
        return tied or name.endswith(".rotary_emb.inv_freq")
