"""What Gemma 4's config says of each layer, in its older form and in the one with `per_layer_config`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moebius_kernels.activations import GELU_TANH
from moebius_kernels.rotary import RotarySpec
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.config import (
    FULL,
    SLIDING,
    DecoderConfig,
    read_decoder_config,
    read_layer_types,
    require,
    text_config,
)
from moebius_worker.engine.models.layers import AttentionConfig
from moebius_worker.engine.models.moe import MoeConfig, num_experts

_PATTERN = (*[SLIDING] * 5, FULL)

_DEFAULT_ROPE: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One layer. `inner`: neurons of its dense branch.

    `keys_are_values`: one projection is for both. `reads`: the earlier layer whose keys and values it attends
    to; None: its own.
    """

    attention: AttentionConfig
    rope: RotarySpec
    inner: int
    keys_are_values: bool
    reads: int | None


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """Every layer adds `width` numbers of each token's own, from a table of `vocab_size` rows."""

    vocab_size: int
    width: int


@dataclass(frozen=True, slots=True)
class Gemma4Config:
    """`sizes` are those of the widest layer. `softcap` c makes logits c * tanh(logit / c)."""

    sizes: DecoderConfig
    layers: Sequence[LayerConfig]
    moe: MoeConfig | None
    per_layer: PerLayerConfig | None
    softcap: float | None


def read_gemma4_config(config: Mapping[str, Any]) -> Gemma4Config:
    """Raises CheckpointError for what is missing or not implemented."""
    config = {"tie_word_embeddings": True, **text_config(config)}
    if config.get("use_bidirectional_attention") == "all":
        raise CheckpointError(
            "The config says use_bidirectional_attention = 'all': such a model writes no text."
        )
    # The last layer sees everything, whatever the config says.
    kinds = [*read_layer_types(config, _PATTERN)[:-1], FULL]
    sizes = [_layer_sizes(config, kind, index) for index, kind in enumerate(kinds)]
    first_sharing = len(kinds) - int(config.get("num_kv_shared_layers") or 0)
    wide = 2 if config.get("use_double_wide_mlp") else 1
    layers = [
        LayerConfig(
            attention=one.attention(qk_norm="head", scale=1.0),
            rope=one.rope,
            inner=one.intermediate_size * (wide if index >= first_sharing else 1),
            keys_are_values=kind == FULL and bool(config.get("attention_k_eq_v")),
            reads=_last(kinds[:first_sharing], kind) if index >= first_sharing else None,
        )
        for index, (kind, one) in enumerate(zip(kinds, sizes, strict=True))
    ]
    widest = max(sizes, key=lambda one: one.head_dim * (one.num_heads + 2 * one.num_kv_heads))
    return Gemma4Config(
        sizes=replace(widest, intermediate_size=max(layer.inner for layer in layers)),
        layers=layers,
        moe=_moe(config) if config.get("enable_moe_block") else None,
        per_layer=_per_layer(config),
        softcap=config.get("final_logit_softcapping"),
    )


def _layer_sizes(config: Mapping[str, Any], kind: str, index: int) -> DecoderConfig:
    ropes = config.get("rope_parameters") or _DEFAULT_ROPE
    if kind not in ropes:
        raise CheckpointError(f"The config's rope_parameters say nothing of {kind!r}.")
    own = {
        **_own_heads(config, kind, index),
        "rope_parameters": ropes[kind],
        "sliding_window": require(config, "sliding_window") if kind == SLIDING else None,
    }
    return read_decoder_config(
        {**config, **own},
        default_theta=_DEFAULT_ROPE[kind]["rope_theta"],
        implements=("final_logit_softcapping", "layer_types"),
        activations=("gelu_pytorch_tanh",),
    )


def _own_heads(config: Mapping[str, Any], kind: str, index: int) -> Mapping[str, Any]:
    """How a layer's heads differ from what the config says of all."""
    if (by_layer := config.get("per_layer_config")) is not None:
        own: Mapping[str, Any] = by_layer.get(str(index), {})
        return own
    if kind == SLIDING:
        return {}
    heads: dict[str, Any] = {"head_dim": config.get("global_head_dim") or 512}
    if config.get("attention_k_eq_v") and (count := config.get("num_global_key_value_heads")):
        heads["num_key_value_heads"] = count
    return heads


def _last(kinds: Sequence[str], kind: str) -> int:
    if kind not in kinds:
        raise CheckpointError(
            f"The config's num_kv_shared_layers leaves no {kind!r} layer with keys and values of its own."
        )
    return len(kinds) - 1 - kinds[::-1].index(kind)


def _moe(config: Mapping[str, Any]) -> MoeConfig:
    return MoeConfig(
        hidden_size=require(config, "hidden_size"),
        inner=require(config, "moe_intermediate_size"),
        total=num_experts(config),
        per_token=require(config, "top_k_experts"),
        activation=GELU_TANH,
    )


def _per_layer(config: Mapping[str, Any]) -> PerLayerConfig | None:
    if not config.get("hidden_size_per_layer_input"):
        return None
    found = PerLayerConfig(
        require(config, "vocab_size_per_layer_input"), require(config, "hidden_size_per_layer_input")
    )
    if found.vocab_size < require(config, "vocab_size"):
        raise CheckpointError(
            f"vocab_size_per_layer_input = {found.vocab_size} leaves ids of the vocabulary without inputs."
        )
    return found
