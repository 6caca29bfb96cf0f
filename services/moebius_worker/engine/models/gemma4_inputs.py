"""Inputs for each layer of Gemma 4's small models: of each token, from its id and from its embedding."""

from collections.abc import Sequence

import torch

from moebius_kernels.activations import GELU_TANH
from moebius_worker.engine.models.config import DecoderConfig
from moebius_worker.engine.models.gemma4_config import PerLayerConfig
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import Linear, RmsNorm
from moebius_worker.engine.models.parameters import Matrix, Slots


def rounded(value: float, dtype: torch.dtype) -> float:
    """As near as `dtype` comes: the models were trained with such factors."""
    return float(torch.tensor(value, dtype=dtype))


class LayerInputs(Layer):
    """The inputs of all layers."""

    def __init__(self, sizes: DecoderConfig, config: PerLayerConfig) -> None:
        self.num_layers, self.width = sizes.num_layers, config.width
        self.hidden_size = sizes.hidden_size
        self.table = Matrix({"": config.vocab_size}, sizes.num_layers * config.width)
        self.projection = Linear(
            sizes.hidden_size, {"per_layer_model_projection": sizes.num_layers * config.width}
        )
        self.norm = RmsNorm(config.width, sizes.norm_eps)

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> Sequence[torch.Tensor]:
        """Embeddings [T, hidden] and ids [T] -> [T, width] for each layer."""
        [table] = self.table.blocks
        of_id = self.ops.embedding(token_ids, table, x.dtype) * rounded(self.width**0.5, x.dtype)
        of_embedding = self.projection(x) * self.hidden_size**-0.5
        shape = (self.num_layers, self.width)
        inputs = self.norm(of_embedding.unflatten(-1, shape)) + of_id.unflatten(-1, shape)
        return (inputs * 2**-0.5).unbind(1)

    def slots(self, prefix: str) -> Slots:
        return (
            {f"{prefix}.embed_tokens_per_layer.weight": self.table.slot("")}
            | self.projection.slots(prefix)
            | self.norm.slots(f"{prefix}.per_layer_projection_norm")
        )


class AddLayerInputs(Layer):
    """A layer's last part: its own inputs, gated by what it has computed, join the stream."""

    def __init__(self, hidden: int, width: int, norm_eps: float) -> None:
        self.gate = Linear(hidden, {"per_layer_input_gate": width})
        self.projection = Linear(width, {"per_layer_projection": hidden})
        self.norm = RmsNorm(hidden, norm_eps)

    def __call__(self, x: torch.Tensor, own_input: torch.Tensor) -> torch.Tensor:
        """[T, hidden] and [T, width] -> [T, hidden]."""
        y = self.ops.gated(torch.cat((self.gate(x), own_input), dim=-1), GELU_TANH)
        return x + self.norm(self.projection(y))

    def slots(self, prefix: str) -> Slots:
        """`prefix` is the layer's: the parts lie side by side there."""
        return (
            self.gate.slots(prefix)
            | self.projection.slots(prefix)
            | self.norm.slots(f"{prefix}.post_per_layer_input_norm")
        )
