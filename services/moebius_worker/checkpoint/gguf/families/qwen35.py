"""Qwen 3.5 and 3.6, dense and with experts, and Qwen 3 Next: gated delta nets between attention layers.

Norms are stored with 1 added, except the delta net's. 3.5 has value heads in the order in which ggml repeats
key heads. Qwen 3 Next keeps them; GGUF divides its packed projections as 3.5 has them, so that it is told
here as the Qwen 3.5 with experts that it then is.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from moebius_worker.checkpoint.gguf.families.common import (
    ATTENTION,
    DECODER,
    DENSE,
    EXPERTS,
    MLP,
    SOFTMAX_NORMALISED,
    TOP,
    experts,
    shared_expert,
)
from moebius_worker.checkpoint.gguf.family import Family, Part, Parts
from moebius_worker.checkpoint.gguf.keys import Keys, Value, const, need, num_layers
from moebius_worker.checkpoint.gguf.order import (
    Order,
    OrderError,
    log_of_negative,
    minus_one,
    one_channel,
    value_heads,
)
from moebius_worker.checkpoint.gguf.rope import partial_rope


def _layer_types(keys: Keys) -> list[str]:
    count, recurrent = num_layers(keys), keys.layers("attention.recurrent_layers")
    interval = keys.get("full_attention_interval", 4)
    if recurrent is None:
        recurrent = [bool((layer + 1) % interval) for layer in range(count)]
    return ["linear_attention" if linear else "full_attention" for linear in recurrent]


def _value_head_dim(keys: Keys) -> int:
    return int(keys.need("ssm.inner_size") // keys.need("ssm.time_step_rank"))


_CONFIG: Mapping[str, Value] = {
    **DECODER,
    "rope_parameters": partial_rope(0.25),
    "attention_bias": const(False),
    "layer_types": _layer_types,
    "linear_conv_kernel_dim": need("ssm.conv_kernel"),
    "linear_key_head_dim": need("ssm.state_size"),
    "linear_value_head_dim": _value_head_dim,
    "linear_num_key_heads": need("ssm.group_count"),
    "linear_num_value_heads": need("ssm.time_step_rank"),
}
_EXPERTS: Mapping[str, Value] = {
    **EXPERTS,
    "moe_intermediate_size": need("expert_feed_forward_length"),
    "shared_expert_intermediate_size": need("expert_shared_feed_forward_length"),
}
# How pictures' positions are divided; a text's are all the same.
_SECTIONS = {"rope.dimension_sections"}
_TOP: Mapping[str, Parts] = {**TOP, "output_norm": Part("model.norm", values=minus_one)}
_COMMON: Mapping[str, Parts] = {
    **ATTENTION,
    "attn_norm": Part("input_layernorm", values=minus_one),
    "post_attention_norm": Part("post_attention_layernorm", values=minus_one),
    "attn_q_norm": Part("self_attn.q_norm", values=minus_one),
    "attn_k_norm": Part("self_attn.k_norm", values=minus_one),
    "ssm_norm": Part("linear_attn.norm"),
}
_DIM = "linear_value_head_dim"
_TILED: Mapping[str, Parts] = {
    **_COMMON,
    "attn_qkv": Part("linear_attn.in_proj_qkv", rows=value_heads(_DIM, after_keys=True)),
    "attn_gate": Part("linear_attn.in_proj_z", rows=value_heads(_DIM)),
    "ssm_alpha": Part("linear_attn.in_proj_a", rows=value_heads()),
    "ssm_beta": Part("linear_attn.in_proj_b", rows=value_heads()),
    "ssm_a": Part("linear_attn.A_log", rows=value_heads(), values=log_of_negative),
    "ssm_dt.bias": Part("linear_attn.dt_bias", rows=value_heads()),
    "ssm_conv1d.weight": Part(
        "linear_attn.conv1d.weight", rows=value_heads(_DIM, after_keys=True), values=one_channel
    ),
    "ssm_out": Part("linear_attn.out_proj", columns=value_heads(_DIM)),
}
_MOE: Mapping[str, Parts] = {
    "ffn_gate_inp": Part("mlp.gate"),
    **experts("mlp.experts"),
    **shared_expert("mlp.shared_expert"),
    "ffn_gate_inp_shexp.weight": Part("mlp.shared_expert_gate.weight", values=np.atleast_2d),
}

QWEN35 = Family(
    architecture="qwen35",
    class_name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    config={**_CONFIG, **DENSE},
    top=_TOP,
    layer={**_TILED, **MLP},
    unread=_SECTIONS,
)
QWEN35_MOE = Family(
    architecture="qwen35moe",
    class_name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    config={**_CONFIG, **_EXPERTS},
    top=_TOP,
    layer={**_TILED, **_MOE},
    only=SOFTMAX_NORMALISED,
    unread=_SECTIONS | {"feed_forward_length"},
)


def _of_key_heads(indices: tuple[int, ...], *size_keys: str | None) -> Order:
    """Some of the parts that stand for each key head in turn.

    Each size is a key's dimension, a value head's times the value heads of a key head, or (None) one for each
    of those.
    """

    def order(config: Mapping[str, Any], count: int) -> np.ndarray:
        keys, repeats = config["linear_num_key_heads"], config["linear_num_value_heads"]
        repeats //= keys
        sizes = {
            "linear_key_head_dim": config["linear_key_head_dim"],
            _DIM: repeats * config[_DIM],
            None: repeats,
        }
        lengths = [sizes[key] for key in size_keys]
        if count != keys * sum(lengths):
            raise OrderError(f"its {count} rows are no {' + '.join(map(str, lengths))} for {keys} key heads")
        rows = np.split(np.arange(count).reshape(keys, -1), np.cumsum(lengths)[:-1], axis=1)
        return np.concatenate([rows[index].reshape(-1) for index in indices])

    return order


_BETA_DECAY = (None, None)
_QKVZ = ("linear_key_head_dim", "linear_key_head_dim", _DIM, _DIM)
QWEN3_NEXT = Family(
    architecture="qwen3next",
    class_name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    config={**_CONFIG, **_EXPERTS},
    top=_TOP,
    layer={
        **_COMMON,
        **_MOE,
        "attn_qkv": Part("linear_attn.in_proj_qkv"),
        "attn_gate": Part("linear_attn.in_proj_z"),
        "ssm_ba": (
            Part("linear_attn.in_proj_b", rows=_of_key_heads((0,), *_BETA_DECAY)),
            Part("linear_attn.in_proj_a", rows=_of_key_heads((1,), *_BETA_DECAY)),
        ),
        # How older files have what is apart above.
        "ssm_in": (
            Part("linear_attn.in_proj_qkv", rows=_of_key_heads((0, 1, 2), *_QKVZ)),
            Part("linear_attn.in_proj_z", rows=_of_key_heads((3,), *_QKVZ)),
        ),
        "ssm_a": Part("linear_attn.A_log", values=log_of_negative),
        "ssm_dt.bias": Part("linear_attn.dt_bias"),
        "ssm_conv1d.weight": Part("linear_attn.conv1d.weight", values=one_channel),
        "ssm_out": Part("linear_attn.out_proj"),
    },
    only=SOFTMAX_NORMALISED,
    unread={"feed_forward_length"},
)
