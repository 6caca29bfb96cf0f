"""Rows of the tables that most families share."""

from collections.abc import Mapping
from typing import Any

from moebius_worker.checkpoint.gguf.family import Part, Parts
from moebius_worker.checkpoint.gguf.keys import (
    Keys,
    Value,
    const,
    get,
    head_dim,
    need,
    num_kv_heads,
    num_layers,
    token_id,
    vocab_size,
)
from moebius_worker.checkpoint.gguf.order import half, part
from moebius_worker.checkpoint.gguf.rope import rope

DECODER: Mapping[str, Value] = {
    "vocab_size": vocab_size,
    "hidden_size": need("embedding_length"),
    "num_hidden_layers": num_layers,
    "num_attention_heads": need("attention.head_count"),
    "num_key_value_heads": num_kv_heads,
    "head_dim": head_dim,
    "hidden_act": const("silu"),
    "max_position_embeddings": need("context_length"),
    "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
    "rope_parameters": rope,
    "tie_word_embeddings": lambda keys: not keys.has("output.weight"),
    "bos_token_id": token_id("bos"),
    "eos_token_id": token_id("eos"),
    "pad_token_id": token_id("padding"),
}
DENSE: Mapping[str, Value] = {"intermediate_size": need("feed_forward_length")}
EXPERTS: Mapping[str, Value] = {
    "num_experts": need("expert_count"),
    "num_experts_per_tok": need("expert_used_count"),
}
SIGMOID_EXPERTS: Mapping[str, Value] = {
    "n_routed_experts": need("expert_count"),
    "num_experts_per_tok": need("expert_used_count"),
    "n_shared_experts": get("expert_shared_count", 0),
    "n_group": get("expert_group_count", 1),
    "topk_group": get("expert_group_used_count", 1),
    "routed_scaling_factor": get("expert_weights_scale", 1.0),
    "moe_intermediate_size": need("expert_feed_forward_length"),
    "first_k_dense_replace": get("leading_dense_block_count", 0),
}


def windows(period: int) -> Value:
    """`layer_types`: every `period`-th layer sees all, unless the file has another number, or a list."""

    def value(keys: Keys) -> list[str]:
        pattern = keys.raw("attention.sliding_window_pattern", period)
        if not isinstance(pattern, list):
            pattern = [layer % pattern < pattern - 1 for layer in range(num_layers(keys))]
        return ["sliding_attention" if window else "full_attention" for window in pattern[: num_layers(keys)]]

    return value


SOFTMAX, SIGMOID = 1, 2
SOFTMAX_NORMALISED: Mapping[str, tuple[Any, ...]] = {
    "expert_gating_func": (SOFTMAX,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (1.0, 0.0),
    "expert_shared_count": (0,),
}

TOP: Mapping[str, Parts] = {
    "token_embd": Part("model.embed_tokens"),
    "output_norm": Part("model.norm"),
    "output": Part("lm_head"),
}


def _query(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"] * config["head_dim"])


def _key(config: Mapping[str, Any]) -> int:
    return int(config["num_key_value_heads"] * config["head_dim"])


QKV = (_query, _key, _key)
ATTENTION: Mapping[str, Parts] = {
    "attn_norm": Part("input_layernorm"),
    "attn_q": Part("self_attn.q_proj"),
    "attn_k": Part("self_attn.k_proj"),
    "attn_v": Part("self_attn.v_proj"),
    # What the converter makes of the three with --fuse-qkv.
    "attn_qkv": (
        Part("self_attn.q_proj", rows=part(0, *QKV)),
        Part("self_attn.k_proj", rows=part(1, *QKV)),
        Part("self_attn.v_proj", rows=part(2, *QKV)),
    ),
    "attn_output": Part("self_attn.o_proj"),
}
QK_NORM: Mapping[str, Parts] = {
    "attn_q_norm": Part("self_attn.q_norm"),
    "attn_k_norm": Part("self_attn.k_norm"),
}
MLP_NORM: Mapping[str, Parts] = {"ffn_norm": Part("post_attention_layernorm")}
MLP: Mapping[str, Parts] = {
    "ffn_gate": Part("mlp.gate_proj"),
    "ffn_up": Part("mlp.up_proj"),
    "ffn_down": Part("mlp.down_proj"),
}


def experts(
    prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Parts]:
    """The stacks of experts under `prefix`, with gate and up apart or one after the other."""
    path = f"{prefix}.{{expert}}."
    return {
        "ffn_gate_exps": Part(path + gate),
        "ffn_up_exps": Part(path + up),
        "ffn_down_exps": Part(path + down),
        "ffn_gate_up_exps": (Part(path + gate, rows=half(0)), Part(path + up, rows=half(1))),
    }


def shared_expert(prefix: str) -> dict[str, Parts]:
    return {
        "ffn_gate_shexp": Part(f"{prefix}.gate_proj"),
        "ffn_up_shexp": Part(f"{prefix}.up_proj"),
        "ffn_down_shexp": Part(f"{prefix}.down_proj"),
    }
