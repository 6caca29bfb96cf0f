"""llama.cpp's `deepseek2`: DeepSeek V3 and what is published in its form (sigmoid router), and V2 (softmax).

Multi-head latent attention is stored as it is computed without decompressing keys and values: `kv_b_proj` is
divided by heads into the keys' part, transposed, and the values' part.
"""

from collections.abc import Mapping

import numpy as np

from moebius_worker.checkpoint.gguf.families.common import (
    DECODER,
    DENSE,
    MLP,
    MLP_NORM,
    SIGMOID,
    SIGMOID_EXPERTS,
    SOFTMAX,
    TOP,
    experts,
    shared_expert,
)
from moebius_worker.checkpoint.gguf.family import Family, Join, Part, Parts
from moebius_worker.checkpoint.gguf.keys import Keys, Value, const, get, need
from moebius_worker.checkpoint.gguf.rope import yarn_rope


def _rope_dim(keys: Keys) -> int:
    return int(keys.need("rope.dimension_count"))


def _nope_dim(keys: Keys) -> int:
    # Older files have no key for the decompressed size; theirs is the one of the heads.
    length = keys.get("attention.key_length_mla", keys.need("attention.key_length"))
    return int(length - _rope_dim(keys))


def _value_dim(keys: Keys) -> int:
    return int(keys.get("attention.value_length_mla", keys.need("attention.value_length")))


def _heads(keys: Keys) -> int:
    """There is one compressed kv head, which is the same for all heads; it is told as it is decompressed."""
    heads = int(keys.need("attention.head_count"))
    keys.only("attention.head_count_kv", 1, heads)
    return heads


_CONFIG: Mapping[str, Value] = {
    **{key: value for key, value in DECODER.items() if key != "head_dim"},
    **DENSE,
    **SIGMOID_EXPERTS,
    "num_key_value_heads": _heads,
    "rope_parameters": yarn_rope(_rope_dim, 0.1, {}),
    "attention_bias": const(False),
    "q_lora_rank": get("attention.q_lora_rank"),
    "kv_lora_rank": need("attention.kv_lora_rank"),
    "qk_rope_head_dim": _rope_dim,
    "qk_nope_head_dim": _nope_dim,
    "v_head_dim": _value_dim,
    "norm_topk_prob": get("expert_weights_norm", False),
}
_LAYER: Mapping[str, Parts] = {
    "attn_norm": Part("input_layernorm"),
    "attn_q": Part("self_attn.q_proj"),
    "attn_q_a": Part("self_attn.q_a_proj"),
    "attn_q_a_norm": Part("self_attn.q_a_layernorm"),
    "attn_q_b": Part("self_attn.q_b_proj"),
    "attn_kv_a_mqa": Part("self_attn.kv_a_proj_with_mqa"),
    "attn_kv_a_norm": Part("self_attn.kv_a_layernorm"),
    "attn_kv_b": Part("self_attn.kv_b_proj"),
    "attn_output": Part("self_attn.o_proj"),
    **MLP_NORM,
    **MLP,
    "ffn_gate_inp": Part("mlp.gate"),
    "exp_probs_b.bias": Part("mlp.gate.e_score_correction_bias"),
    **experts("mlp.experts"),
    **shared_expert("mlp.shared_experts"),
}


def _kv_b(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[H, L, K] and [H, V, L] to [H (K + V), L]."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[-1])


def _kv_b_shape(keys: tuple[int, ...], values: tuple[int, ...]) -> tuple[int, ...]:
    return keys[0] * (keys[2] + values[1]), values[2]


_KV_B = Join("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), _kv_b, _kv_b_shape)


def _has_sigmoid_router(keys: Keys) -> bool:
    # Some files (GLM 4.7 Flash) do not say it, but only these routers have a bias for the choice.
    biased = any(".exp_probs_b." in name for name in keys.gguf.tensors)
    return bool(keys.get("expert_gating_func", SIGMOID if biased else SOFTMAX) == SIGMOID)


DEEPSEEK_V3 = Family(
    architecture="deepseek2",
    class_name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    config={
        **_CONFIG,
        "scoring_func": const("sigmoid"),
        "topk_method": const("noaux_tc"),
        "num_nextn_predict_layers": const(0),
    },
    top=TOP,
    layer=_LAYER,
    joins=(_KV_B,),
    only={"expert_gating_func": (SIGMOID,)},
    unread={"attention.key_length", "attention.value_length"},
    applies=_has_sigmoid_router,
)
DEEPSEEK_V2 = Family(
    architecture="deepseek2",
    class_name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    config={
        **_CONFIG,
        "scoring_func": const("softmax"),
        "n_group": get("expert_group_count"),
        "topk_group": get("expert_group_used_count"),
        "topk_method": lambda keys: (
            "group_limited_greedy" if keys.get("expert_group_count", 1) > 1 else "greedy"
        ),
    },
    top=TOP,
    layer=_LAYER,
    joins=(_KV_B,),
    only={"expert_gating_func": (SOFTMAX,)},
    unread={"attention.key_length", "attention.value_length"},
    applies=lambda keys: not _has_sigmoid_router(keys),
)
