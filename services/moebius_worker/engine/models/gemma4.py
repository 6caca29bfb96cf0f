"""Gemma 4: dense, with routed experts beside the dense network, or small with inputs of each layer's own.

Layers see all of the text or a window of it, with heads of different sizes. Checkpoints that also see and
hear are served for text alone.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from moebius_kernels.activations import GELU_TANH
from moebius_kernels.rotary import Rotary, RotarySpec
from moebius_kernels.router import Route
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.gemma4_attention import Gemma4Attention
from moebius_worker.engine.models.gemma4_config import Gemma4Config, LayerConfig, read_gemma4_config
from moebius_worker.engine.models.gemma4_inputs import AddLayerInputs, LayerInputs, rounded
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.layers import GatedMlp, Linear, RmsNorm
from moebius_worker.engine.models.moe import (
    FUSED_EXPERTS,
    ExpertNames,
    ExpertStore,
    MoeConfig,
    ResidentExperts,
)
from moebius_worker.engine.models.parameters import Place, Slots, Vector
from moebius_worker.engine.models.residual import Residual
from moebius_worker.engine.weights.layout import Layout


class Gemma4Experts(Layer):
    """Experts whose router has a norm of its own, and scales what each expert adds."""

    def __init__(self, config: MoeConfig, norm_eps: float) -> None:
        self.config, self.norm_eps = config, norm_eps
        self.scale = Vector(config.hidden_size)
        self.router = Linear(config.hidden_size, {"proj": config.total})
        self.per_expert_scale = Vector(config.total)
        self.norm = RmsNorm(config.hidden_size, norm_eps)
        self.experts: ExpertStore = ResidentExperts(config, ExpertNames())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        route = self._route(x)
        return self.ops.routed_experts(self.norm(x), route, self.experts.fetch(route), self.config.activation)

    def _route(self, x: torch.Tensor) -> Route:
        scale = self.scale.data.float() * self.config.hidden_size**-0.5
        logits = self.router(self.ops.rms_norm(x, scale, self.norm_eps))
        route = self.ops.topk_softmax(logits, self.config.per_token)
        return Route(route.weights * self.per_expert_scale.data.float()[route.experts], route.experts)

    def slots(self, prefix: str) -> Slots:
        """`prefix` is the layer's: the parts lie side by side there."""
        return (
            {
                f"{prefix}.router.scale": self.scale.slot(),
                f"{prefix}.router.per_expert_scale": self.per_expert_scale.slot(),
            }
            | self.router.slots(f"{prefix}.router")
            | self.norm.slots(f"{prefix}.pre_feedforward_layernorm_2")
            | self.experts.slots(f"{prefix}.experts")
        )


class Gemma4Layer(Layer):
    def __init__(self, config: Gemma4Config, layer: LayerConfig, attention: Gemma4Attention) -> None:
        hidden, eps = config.sizes.hidden_size, config.sizes.norm_eps
        self.attention = attention
        self.mlp = GatedMlp(hidden, layer.inner, activation=GELU_TANH)
        names = ["input_layernorm", "post_attention_layernorm"]
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        self.experts: Gemma4Experts | None = None
        if config.moe is not None:
            self.experts = Gemma4Experts(config.moe, eps)
            names += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
        # By the names that the checkpoints give them.
        self.norms = {name: RmsNorm(hidden, eps) for name in names}
        self.own_inputs: AddLayerInputs | None = None
        if config.per_layer is not None:
            self.own_inputs = AddLayerInputs(hidden, config.per_layer.width, eps)
        self.scalar = Vector(1)

    def __call__(
        self, residual: Residual, context: StepContext, own_input: torch.Tensor | None = None
    ) -> Residual:
        """`own_input` [T, width]: of a model with inputs for each layer, this one's."""
        norms = self.norms
        x, y = norms["input_layernorm"].of_sum(residual)
        y = self.attention(y, context)
        x, y = norms["pre_feedforward_layernorm"].of_sum(Residual(x, norms["post_attention_layernorm"](y)))
        y = self.mlp(y)
        if self.experts is not None:
            y = norms["post_feedforward_layernorm_1"](y)
            y = y + norms["post_feedforward_layernorm_2"](self.experts(x))
        x = x + norms["post_feedforward_layernorm"](y)
        if self.own_inputs is not None:
            assert own_input is not None
            x = self.own_inputs(x, own_input)
        return Residual(x * self.scalar.data)

    def slots(self, prefix: str) -> Slots:
        slots = self.attention.slots(f"{prefix}.self_attn") | self.mlp.slots(f"{prefix}.mlp")
        for name, norm in self.norms.items():
            slots |= norm.slots(f"{prefix}.{name}")
        for branch in (self.experts, self.own_inputs):
            if branch is not None:
                slots |= branch.slots(prefix)
        return slots | {f"{prefix}.layer_scalar": self.scalar.slot()}


class Gemma4ForCausalLM(Decoder):
    """Also the text of Gemma4ForConditionalGeneration, whose names have `language_model` in them."""

    LAYOUT: ClassVar[Layout] = Layout(
        renames=((r"^model\.language_model\.", "model."),),
        stacks=FUSED_EXPERTS,
        ignored=(r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",),
    )

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        self.gemma4 = read_gemma4_config(config)
        sizes, caches = self.gemma4.sizes, CacheSpecs()
        self.blocks: list[Gemma4Layer] = []
        rotaries: dict[RotarySpec, Rotary] = {}
        for layer in self.gemma4.layers:
            rotary = rotaries.setdefault(layer.rope, Rotary(layer.rope, place.device))
            shared = None if layer.reads is None else self.blocks[layer.reads].attention.cache
            attention = Gemma4Attention(layer, rotary, caches, shared)
            self.blocks.append(Gemma4Layer(self.gemma4, layer, attention))
        super().__init__(sizes, self.blocks, caches, place, row_elements=_row_elements(self.gemma4))
        self.layer_inputs: LayerInputs | None = None
        if self.gemma4.per_layer is not None:
            self.layer_inputs = LayerInputs(sizes, self.gemma4.per_layer)

    @property
    def expert_share(self) -> float:
        moe = self.gemma4.moe
        return 1.0 if moe is None else moe.per_token / moe.total

    def forward(self, context: StepContext, progress: Callable[[], None]) -> torch.Tensor:
        x = self.embed(context)
        own_inputs: Sequence[torch.Tensor | None] = [None] * len(self.blocks)
        if self.layer_inputs is not None:
            own_inputs = self.layer_inputs(x, context.token_ids)
        residual = Residual(x)
        for layer, own_input in zip(self.blocks, own_inputs, strict=True):
            residual = layer(residual, context, own_input)
            progress()
        return residual.total()

    def embed(self, context: StepContext) -> torch.Tensor:
        x = super().embed(context)
        return x * rounded(self.config.hidden_size**0.5, x.dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        cap = self.gemma4.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def slots(self) -> Slots:
        slots = super().slots()
        return slots if self.layer_inputs is None else slots | self.layer_inputs.slots("model")

    def ignores(self, name: str) -> bool:
        """Also what checkpoints hold for layers that read other layers' keys and values."""
        found = re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\..*", name)
        if found and (index := int(found[1])) < len(self.gemma4.layers):
            return self.gemma4.layers[index].reads is not None
        return super().ignores(name)


def _row_elements(config: Gemma4Config) -> int:
    """What a row of a step takes beside what it takes in all families."""
    total = 0
    if config.moe is not None:
        # A row is copied for each of its experts: in, out, and back in order in fp32.
        total += 4 * config.moe.per_token * config.sizes.hidden_size
    if config.per_layer is not None:
        total += 3 * config.sizes.num_layers * config.per_layer.width
    return total
