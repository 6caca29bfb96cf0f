"""Gemma 3: norms before and after attention and network; of six layers, five see a window of the text."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from moebius_kernels.activations import GELU_TANH
from moebius_kernels.rotary import Rotary
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import (
    FULL,
    SLIDING,
    DecoderConfig,
    read_decoder_config,
    read_layer_types,
    require,
    text_config,
)
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.gemma4_inputs import rounded
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import Attention, GatedMlp, RmsNorm
from moebius_worker.engine.models.parameters import Place, Slots
from moebius_worker.engine.models.residual import Residual
from moebius_worker.engine.weights.layout import Layout

_THETA = {SLIDING: 10_000.0, FULL: 1_000_000.0}
# Published configs leave out what is as in transformers' `Gemma3TextConfig`.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


class Gemma3Layer(Layer):
    def __init__(self, config: DecoderConfig, attention: Attention) -> None:
        self.attention = attention
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size, activation=GELU_TANH)
        self.norms = {name: RmsNorm(config.hidden_size, config.norm_eps, offset=1.0) for name in _NORMS}

    def __call__(self, residual: Residual, context: StepContext) -> Residual:
        before_attention, after_attention, before_mlp, after_mlp = self.norms.values()
        x, normed = before_attention.of_sum(residual)
        x, normed = before_mlp.of_sum(Residual(x, after_attention(self.attention(normed, context))))
        return Residual(x, after_mlp(self.mlp(normed)))

    def slots(self, prefix: str) -> Slots:
        slots = self.attention.slots(f"{prefix}.self_attn") | self.mlp.slots(f"{prefix}.mlp")
        for name, norm in self.norms.items():
            slots |= norm.slots(f"{prefix}.{name}")
        return slots


class Gemma3ForCausalLM(Decoder):
    """Also the text of Gemma3ForConditionalGeneration."""

    LAYOUT: ClassVar[Layout] = Layout(
        renames=((r"^(model\.)?language_model\.(model\.)?", "model."), (r"^model\.lm_head\.", "lm_head.")),
        ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    )

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        config = {**_DEFAULTS, **text_config(config)}
        if config.get("use_bidirectional_attention"):
            raise CheckpointError(
                "The config says use_bidirectional_attention = True: such a model writes no text."
            )
        kinds = read_layer_types(config, (*[SLIDING] * 5, FULL))
        sizes = {kind: _sizes(config, kind) for kind in (SLIDING, FULL)}
        rotaries = {kind: Rotary(size.rope, place.device) for kind, size in sizes.items()}
        scale = require(config, "query_pre_attn_scalar", float) ** -0.5
        caches = CacheSpecs()
        layers = []
        for kind in kinds:
            heads = sizes[kind].attention(qk_norm="head", norm_offset=1.0, scale=scale)
            layers.append(Gemma3Layer(sizes[kind], Attention(heads, rotaries[kind], caches)))
        super().__init__(sizes[FULL], layers, caches, place, norm_offset=1.0)

    def embed(self, context: StepContext) -> torch.Tensor:
        x = super().embed(context)
        return x * rounded(self.config.hidden_size**0.5, x.dtype)


def _sizes(config: Mapping[str, Any], kind: str) -> DecoderConfig:
    """Those of one kind of layer: it has a window or not, and rotary settings of its own.

    In older configs `rope_theta` and `rope_scaling` are those of full layers, `rope_local_base_freq` is for
    the others.
    """
    own: dict[str, Any] = {"sliding_window": config["sliding_window"] if kind == SLIDING else None}
    ropes = config.get("rope_parameters") or {}
    if kind in ropes:
        own["rope_parameters"] = ropes[kind]
    elif kind == SLIDING:
        own |= {
            "rope_parameters": None,
            "rope_theta": config.get("rope_local_base_freq"),
            "rope_scaling": None,
        }
    return read_decoder_config(
        {**config, **own},
        default_theta=_THETA[kind],
        implements=("layer_types",),
        activations=("gelu_pytorch_tanh",),
    )
