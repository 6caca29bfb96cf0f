"""gpt-oss: experts with biases, gate and up apart; attention sinks; windows in every other layer."""

from typing import Any

from moebius_worker.checkpoint.gguf.families.common import ATTENTION, DECODER, TOP, experts, windows
from moebius_worker.checkpoint.gguf.family import Family, Part
from moebius_worker.checkpoint.gguf.keys import Keys, const, need
from moebius_worker.checkpoint.gguf.rope import rope

_SOFTMAX_OF_CHOSEN = 3


def _rope(keys: Keys) -> dict[str, Any]:
    parameters = rope(keys)
    if parameters["rope_type"] == "yarn":
        # What the model's authors have; GGUF does not say it.
        parameters = {"beta_fast": 32.0, "beta_slow": 1.0, **parameters, "truncate": False}
    return parameters


GPT_OSS = Family(
    architecture="gpt-oss",
    class_name="GptOssForCausalLM",
    model_type="gpt_oss",
    config={
        **DECODER,
        "rope_parameters": _rope,
        "attention_bias": const(True),
        "num_local_experts": need("expert_count"),
        "num_experts_per_tok": need("expert_used_count"),
        "intermediate_size": need("expert_feed_forward_length"),
        "sliding_window": need("attention.sliding_window"),
        "layer_types": windows(2),
        "swiglu_alpha": const(1.702),
        "swiglu_limit": const(7.0),
    },
    top=TOP,
    layer={
        **ATTENTION,
        "post_attention_norm": Part("post_attention_layernorm"),
        "attn_sinks.weight": Part("self_attn.sinks"),
        "ffn_gate_inp": Part("mlp.router"),
        **experts("mlp.experts"),
    },
    only={"expert_gating_func": (_SOFTMAX_OF_CHOSEN,), "attention.causal": (True,)},
    unread={"feed_forward_length"},
)
