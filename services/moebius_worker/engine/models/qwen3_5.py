"""Qwen3.5 and Qwen3.6, dense and with experts: three layers of linear attention to one of full attention.

Served text-only: without images the interleaved rotary sections are plain rotary positions.
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from moebius_kernels.rotary import Rotary
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.layer_caches import CacheSpecs
from moebius_worker.engine.models.config import DecoderConfig, read_decoder_config, require, text_config
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.gated_delta_net import DeltaNetConfig, GatedDeltaNet, read_delta_net
from moebius_worker.engine.models.layers import Attention
from moebius_worker.engine.models.moe import FUSED_EXPERTS, MoeDecoder, read_experts
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.pre_norm import FeedForward, PreNormLayer, dense_mlp
from moebius_worker.engine.models.shared_expert import SharedExpertMoe
from moebius_worker.engine.weights.layout import Layout

_LINEAR = "linear_attention"
# Of Qwen4-Exp the others, by the release of transformers that wrote the config; its published configs call
# them by the first name.
_FULL = ("full_attention", "indexed_attention", "qwen_sparse_attention")

LAYOUT = Layout(
    renames=((r"^model\.language_model\.", "model."),),
    stacks=FUSED_EXPERTS,
    # Layers that guess further tokens, and the encoder of images.
    ignored=(r"mtp\..*", r"model\.visual\..*"),
)


def read_sizes(config: Mapping[str, Any]) -> DecoderConfig:
    """What all families of this line have in common. Raises CheckpointError."""
    # Those that have experts only do not say this.
    inner = config.get("moe_intermediate_size")
    return read_decoder_config(
        {"partial_rotary_factor": 0.25, "intermediate_size": inner, **config},
        default_theta=10_000.0,
        implements=("layer_types",),
    )


def linear_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have linear attention. Raises CheckpointError."""
    every = config.get("full_attention_interval") or 4
    types = config.get("layer_types") or [
        _LINEAR if (index + 1) % every else _FULL[0] for index in range(num_layers)
    ]
    if len(types) != num_layers or not set(types) <= {_LINEAR, *_FULL}:
        raise CheckpointError(
            f"The config says layer_types = {types!r}; "
            f"{num_layers} of {_LINEAR!r} and {_FULL[0]!r} are needed."
        )
    return [kind == _LINEAR for kind in types]


def build_layers(
    config: Mapping[str, Any],
    sizes: DecoderConfig,
    caches: CacheSpecs,
    place: Place,
    mlp: Callable[[int], FeedForward],
    linear: DeltaNetConfig,
    delta_net: type[GatedDeltaNet] = GatedDeltaNet,
) -> list[PreNormLayer]:
    """`mlp` makes the feed-forward network of a layer of that number. Raises CheckpointError."""
    rotary = Rotary(sizes.rope, place.device)
    attention = sizes.attention(
        qk_norm="head", norm_offset=1.0, output_gate=bool(config.get("attn_output_gate", True))
    )
    layers = []
    for index, is_linear in enumerate(linear_layers(config, sizes.num_layers)):
        name = "linear_attn" if is_linear else "self_attn"
        mixer = delta_net(linear, caches) if is_linear else Attention(attention, rotary, caches)
        layers.append(PreNormLayer(sizes, mixer, mlp(index), attention_name=name, norm_offset=1.0))
    return layers


class Qwen35ForCausalLM(Decoder):
    LAYOUT: ClassVar[Layout] = LAYOUT

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        config = text_config(config)
        sizes, caches = read_sizes(config), CacheSpecs()
        linear = read_delta_net(config, sizes)
        layers = build_layers(config, sizes, caches, place, lambda index: dense_mlp(sizes), linear)
        super().__init__(sizes, layers, caches, place, norm_offset=1.0, row_elements=linear.row_elements)


class Qwen35MoeForCausalLM(MoeDecoder):
    LAYOUT: ClassVar[Layout] = LAYOUT

    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        config = text_config(config)
        sizes, caches = read_sizes(config), CacheSpecs()
        linear = read_delta_net(config, sizes)
        moe, shared = read_experts(config, sizes), require(config, "shared_expert_intermediate_size")
        layers = build_layers(
            config, sizes, caches, place, lambda index: SharedExpertMoe(moe, shared), linear
        )
        super().__init__(sizes, moe, layers, caches, place, norm_offset=1.0, row_elements=linear.row_elements)
