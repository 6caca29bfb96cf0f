"""Gemma 4, dense and with experts: the text model.

Sliding and full layers have their own head sizes; norms are stored as they are. `ffn_down_exps.scale` is the
router's scale of each expert, into which NVFP4 files have multiplied the factor of the expert's blocks.
"""

from typing import Any

import numpy as np

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.families.common import ATTENTION, DECODER, MLP, QK_NORM, TOP, experts
from moebius_worker.checkpoint.gguf.family import Family, Part
from moebius_worker.checkpoint.gguf.keys import Keys, const, get, need, num_layers
from moebius_worker.checkpoint.gguf.rope import frequency_divisors

_FULL, _SLIDING = "full_attention", "sliding_attention"


def _layer_types(keys: Keys) -> list[str]:
    pattern = keys.layers("attention.sliding_window_pattern")
    if pattern is None:
        raise CheckpointError(
            f"{keys.gguf.path} lacks the metadata key {keys.prefix}attention.sliding_window_pattern."
        )
    return [_SLIDING if sliding else _FULL for sliding in pattern]


def _heads_of(kind: str) -> Any:
    """The number of kv heads of the layers of one kind; of all layers if none is of that kind."""

    def value(keys: Keys) -> int:
        heads = keys.layers("attention.head_count_kv") or [keys.need("attention.head_count")]
        found = {
            count for count, layer in zip(heads, _layer_types(keys), strict=True) if layer == kind
        } or set(heads)
        if len(found) != 1:
            raise CheckpointError(
                f"{keys.gguf.path}: {keys.prefix}attention.head_count_kv differs between layers of one kind."
            )
        return int(found.pop())

    return value


def _feed_forward(keys: Keys) -> tuple[int, bool]:
    """The width, and whether the layers that share others' keys and values have twice that."""
    widths, shared = keys.layers("feed_forward_length"), keys.get("attention.shared_kv_layers", 0)
    if widths is None:
        raise CheckpointError(f"{keys.gguf.path} lacks the metadata key {keys.prefix}feed_forward_length.")
    own = len(widths) - shared
    for double in (False, True):
        if widths == [widths[0]] * own + [widths[0] * (1 + double)] * shared:
            return widths[0], double
    raise CheckpointError(f"{keys.gguf.path}: {keys.prefix}feed_forward_length = {widths} is not supported.")


def _rope(keys: Keys) -> dict[str, Any]:
    keys.only("rope.scaling.type", "none")
    full, sliding = keys.need("attention.key_length"), keys.need("attention.key_length_swa")
    keys.only("rope.dimension_count", full)
    keys.only("rope.dimension_count_swa", sliding)
    partial = 1.0
    if keys.has("rope_freqs.weight"):
        # Pairs that do not turn have a divisor that makes their frequency nothing.
        divisors = frequency_divisors(keys)
        turning = int(np.count_nonzero(divisors == 1))
        if not np.all(divisors[:turning] == 1) or not np.all(divisors[turning:] > 1e20):
            raise CheckpointError(f"{keys.gguf.path}: rope_freqs.weight is not as Gemma 4 has it.")
        partial = turning / len(divisors)
    return {
        _FULL: {
            "rope_type": "proportional",
            "rope_theta": keys.get("rope.freq_base", 1_000_000.0),
            "partial_rotary_factor": partial,
        },
        _SLIDING: {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)},
    }


def _value_is_key(keys: Keys) -> bool:
    """Whether full layers have no values of their own."""
    own = num_layers(keys) - keys.get("attention.shared_kv_layers", 0)
    full = [layer for layer, kind in enumerate(_layer_types(keys)[:own]) if kind == _FULL]
    return bool(full) and not keys.has(f"blk.{full[0]}.attn_v.weight")


def _full_head_dim(keys: Keys) -> int:
    keys.only("attention.value_length", keys.need("attention.key_length"))
    return int(keys.need("attention.key_length"))


def _sliding_head_dim(keys: Keys) -> int:
    keys.only("attention.value_length_swa", keys.need("attention.key_length_swa"))
    return int(keys.need("attention.key_length_swa"))


def _per_layer_vocab(keys: Keys) -> int:
    name = "per_layer_token_embd.weight"
    return keys.gguf.tensors[name if keys.has(name) else "token_embd.weight"].shape[0]


_CONFIG = {key: value for key, value in DECODER.items() if key != "hidden_act"}

GEMMA4 = Family(
    architecture="gemma4",
    class_name="Gemma4ForCausalLM",
    model_type="gemma4_text",
    config={
        **_CONFIG,
        "hidden_activation": const("gelu_pytorch_tanh"),
        "layer_types": _layer_types,
        "head_dim": _sliding_head_dim,
        "global_head_dim": _full_head_dim,
        "num_key_value_heads": _heads_of(_SLIDING),
        "num_global_key_value_heads": _heads_of(_FULL),
        "attention_bias": const(False),
        "attention_k_eq_v": _value_is_key,
        "rope_parameters": _rope,
        "sliding_window": need("attention.sliding_window"),
        "final_logit_softcapping": get("final_logit_softcapping"),
        "num_kv_shared_layers": get("attention.shared_kv_layers", 0),
        "intermediate_size": lambda keys: _feed_forward(keys)[0],
        "use_double_wide_mlp": lambda keys: _feed_forward(keys)[1],
        "hidden_size_per_layer_input": get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": _per_layer_vocab,
        "enable_moe_block": lambda keys: bool(keys.get("expert_count", 0)),
        "num_experts": get("expert_count"),
        "top_k_experts": get("expert_used_count"),
        "moe_intermediate_size": get("expert_feed_forward_length"),
    },
    top={
        **TOP,
        "per_layer_token_embd": Part("model.embed_tokens_per_layer"),
        "per_layer_model_proj": Part("model.per_layer_model_projection"),
        "per_layer_proj_norm": Part("model.per_layer_projection_norm"),
    },
    layer={
        **ATTENTION,
        **QK_NORM,
        **MLP,
        "post_attention_norm": Part("post_attention_layernorm"),
        "ffn_norm": Part("pre_feedforward_layernorm"),
        "post_ffw_norm": Part("post_feedforward_layernorm"),
        "post_ffw_norm_1": Part("post_feedforward_layernorm_1"),
        "pre_ffw_norm_2": Part("pre_feedforward_layernorm_2"),
        "post_ffw_norm_2": Part("post_feedforward_layernorm_2"),
        "ffn_gate_inp": Part("router.proj"),
        "ffn_gate_inp.scale": Part("router.scale"),
        **experts("experts"),
        "ffn_down_exps.scale": Part("router.per_expert_scale"),
        "layer_output_scale.weight": Part("layer_scalar"),
        "inp_gate": Part("per_layer_input_gate"),
        "proj": Part("per_layer_projection"),
        "post_norm": Part("post_per_layer_input_norm"),
    },
)
