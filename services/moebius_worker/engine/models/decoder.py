"""What decoder families have around their layers: embedding, final norm, head, names of all weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import torch

from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import DecoderConfig
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import RmsNorm
from moebius_worker.engine.models.parameters import Matrix, Place, Shard, Slots
from moebius_worker.engine.models.residual import Residual
from moebius_worker.engine.weights.layout import Layout


class DecoderLayer(Protocol):
    def __call__(self, residual: Residual, context: StepContext) -> Residual: ...

    def slots(self, prefix: str) -> Slots: ...


class FinalNorm(Protocol):
    """What hidden states go through before the head."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def slots(self, prefix: str) -> Slots: ...


class Decoder(Layer):
    """A causal language model: a family is this with its own layers.

    `norm`: None for an RMS norm with `norm_offset`. `row_elements`: how many numbers a layer holds for one
    row of a step at the same time beside those that all families' do.
    """

    # How the family's checkpoints differ from the names in `slots`.
    LAYOUT: ClassVar[Layout] = Layout()
    NORM_NAME: ClassVar[str] = "model.norm"
    # What attention holds of each row and each key that it may see, beside them: a mask, as truth values and
    # as numbers.
    PAIR_BYTES: ClassVar[int] = 5

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[DecoderLayer],
        caches: CacheSpecs,
        place: Place,
        *,
        norm: FinalNorm | None = None,
        norm_offset: float = 0.0,
        row_elements: int = 0,
    ) -> None:
        self.config, self.layers, self.caches, self.place = config, layers, caches, place
        self.embedding = Matrix({"": config.vocab_size}, config.hidden_size)
        self.norm = norm or RmsNorm(config.hidden_size, config.norm_eps, offset=norm_offset)
        self._row_elements = row_elements
        self.head = self.embedding
        if not config.tie_word_embeddings:
            self.head = Matrix({"": config.vocab_size}, config.hidden_size, shard=Shard.COLUMN)

    @property
    def row_elements(self) -> int:
        """How many numbers a layer holds for one row of a step at the same time, roughly and at most."""
        heads = self.config.num_heads + 2 * self.config.num_kv_heads
        return (
            4 * self.config.hidden_size
            + 3 * heads * self.config.head_dim
            + 3 * self.config.intermediate_size
            + self._row_elements
        )

    @property
    def expert_share(self) -> float:
        """What part of its routed experts a token goes to."""
        return 1.0

    def forward(self, context: StepContext, progress: Callable[[], None]) -> torch.Tensor:
        """One step: hidden states [T, hidden] of the context's tokens. Writes keys, values and states.

        `progress` is called after each layer.
        """
        residual = Residual(self.embed(context))
        for layer in self.layers:
            residual = layer(residual, context)
            progress()
        return residual.total()

    def embed(self, context: StepContext) -> torch.Tensor:
        """[T, hidden], the input of the first layer."""
        [table] = self.embedding.blocks
        return self.ops.embedding(context.token_ids, table, self.place.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, hidden] -> fp32 [N, vocab]."""
        return self.ops.linear(self.norm(hidden), self.head.blocks).float()

    def slots(self) -> Slots:
        """Every parameter, or part of a fused one, under the name that Hugging Face checkpoints give it."""
        slots = {"model.embed_tokens.weight": self.embedding.slot("")} | self.norm.slots(self.NORM_NAME)
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"model.layers.{index}")
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = self.head.slot("")
        return slots

    @property
    def copies(self) -> Mapping[str, str]:
        """Tensors that are left out of checkpoints since they are others once more, and these others."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def ignores(self, name: str) -> bool:
        """Tensors that hold nothing new: tied embeddings once more, and frequencies, which are computed."""
        return name in self.copies or name.endswith(".rotary_emb.inv_freq")
