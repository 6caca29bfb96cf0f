"""Llama: a dense decoder. Also what others publish in its form, such as SmolLM2 and Mistral."""

from collections.abc import Mapping
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import DecoderConfig, read_decoder_config, require, text_config
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.layers import Attention, Temperature
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import PreNormLayer, dense_mlp
from moebius_worker.engine.models.rope import rope_parameters
from moebius_worker.engine.weights.layout import Layout


class DenseDecoder(Decoder):
    """A decoder of dense layers that are alike; `kinds` sets fields of their `AttentionConfig`."""

    def __init__(self, sizes: DecoderConfig, place: Place, **kinds: Any) -> None:
        rotary, caches = Rotary(sizes.rope, place.device), CacheSpecs()
        layers = [
            PreNormLayer(sizes, Attention(sizes.attention(**kinds), rotary, caches), dense_mlp(sizes))
            for _ in range(sizes.num_layers)
        ]
        super().__init__(sizes, layers, caches, place)


class LlamaForCausalLM(DenseDecoder):
    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        super().__init__(read_decoder_config(config, default_theta=10_000.0), place)


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window, unless the config says that there is none."""

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        super().__init__({"sliding_window": 4096, **config}, place)


class Mistral3ForConditionalGeneration(DenseDecoder):
    """Mistral Small 3.1 and Ministral 3, of which the latter sharpens attention to long texts.

    Checkpoints that also see are served for text alone.
    """

    LAYOUT: ClassVar[Layout] = Layout(
        renames=(
            (r"^language_model\.", ""),
            (r"^model\.language_model\.", "model."),
        ),
        ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    )

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        config = text_config(config)
        rope, temperature = rope_parameters(config), None
        if (beta := rope.get("llama_4_scaling_beta")) is not None:
            temperature = Temperature(beta, require(rope, "original_max_position_embeddings"))
        sizes = read_decoder_config(config, default_theta=1_000_000.0)
        super().__init__(sizes, place, temperature=temperature)


class Ministral3ForCausalLM(Mistral3ForConditionalGeneration):
    """The text of Ministral 3 alone."""
