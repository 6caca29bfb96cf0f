"""What decoder models read from a checkpoint's config, and the refusal of what they do not implement."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebius_kernels.rotary import RotarySpec
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.layers import AttentionConfig
from moebius_worker.engine.models.rope import read_rope, yarn_context

# Keys that change what is computed, with the values that mean "off": refused by every family that does not
# say that it implements them. Others are names, training settings and defaults of generation.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "no_rope_layers": ([],),
    "qk_norm": (False,),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}

# What `layer_types` says of a layer that sees a window of the text, and of one that sees all of it.
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The sizes that all decoder families share; `rope` says how positions turn queries and keys."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RotarySpec
    # A position sees itself and the `sliding_window - 1` before it; None: all.
    sliding_window: int | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position_embeddings: int

    def attention(self, **kinds: Any) -> AttentionConfig:
        """Attention of these sizes; `kinds` sets more fields of `AttentionConfig`, or sets them otherwise."""
        common: dict[str, Any] = {
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "norm_eps": self.norm_eps,
            "window": self.sliding_window,
            "qkv_bias": self.attention_bias,
            "output_bias": self.attention_bias,
        }
        return AttentionConfig(**(common | kinds))


def require(config: Mapping[str, Any], key: str, kind: type[int] | type[float] = int) -> Any:
    """A number that must be there and greater than 0. Raises CheckpointError."""
    value = config.get(key)
    if not isinstance(value, int | kind) or isinstance(value, bool) or not 0 < value < math.inf:
        raise CheckpointError(f"The config says {key} = {value!r}; a number above 0 is needed.")
    return value


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part that is about text: of a multimodal model's config, `text_config`, whose keys go first.

    But the head is the whole model's, and so is whether it is tied.
    """
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**config, **(config.get("text_config") or {}), **tied}


def read_layer_types(config: Mapping[str, Any], pattern: Sequence[str]) -> list[str]:
    """`SLIDING` or `FULL` for each layer: `layer_types`, by default `pattern` again and again.

    Raises CheckpointError for other types, and for more or fewer than there are layers.
    """
    count = require(config, "num_hidden_layers")
    kinds = list(config.get("layer_types") or (pattern[index % len(pattern)] for index in range(count)))
    if len(kinds) != count or not set(kinds) <= {SLIDING, FULL}:
        raise CheckpointError(
            f"The config says layer_types = {kinds}; {count} times {SLIDING!r} or {FULL!r} is needed."
        )
    return kinds


def read_decoder_config(
    config: Mapping[str, Any],
    *,
    default_theta: float,
    implements: Collection[str] = (),
    activations: Collection[str] = ("silu", "swish"),
) -> DecoderConfig:
    """Reads config.json's keys.

    `implements`: keys with which the family deals itself: of those that are refused otherwise, and
    "layer_types". `activations`: what `hidden_act` may say. Raises CheckpointError naming a key that is
    missing or not implemented.
    """
    for key, neutral in _REFUSED.items():
        if key not in implements and (value := config.get(key)) is not None and value not in neutral:
            raise CheckpointError(f"The config says {key} = {value!r}, which is not implemented.")
    others = set(config.get("layer_types") or ()) - {FULL}
    if others and "layer_types" not in implements:
        raise CheckpointError(f"The config says layer_types = {sorted(others)}, which are not implemented.")
    activation = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    if activation not in activations:
        raise CheckpointError(
            f"The config says hidden_act = {activation!r}; implemented is "
            f"{' or '.join(map(repr, activations))}."
        )
    num_heads = require(config, "num_attention_heads")
    hidden_size = require(config, "hidden_size")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads = {num_heads} is no multiple of num_key_value_heads = {num_kv_heads}."
        )
    head_dim = config.get("head_dim") or hidden_size // num_heads
    if head_dim % 2:
        raise CheckpointError(f"head_dim = {head_dim} is odd; rotary positions turn pairs.")
    window = config.get("sliding_window")
    if window is not None and window < 1:
        raise CheckpointError(f"The config says sliding_window = {window}; null means that there is none.")
    return DecoderConfig(
        vocab_size=require(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=require(config, "intermediate_size"),
        num_layers=require(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=require(config, "rms_norm_eps", float),
        rope=read_rope(config, head_dim, default_theta),
        sliding_window=window,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        max_position_embeddings=max(require(config, "max_position_embeddings"), yarn_context(config)),
    )
