"""llama.cpp's `llama`: Llama and Mistral, and with experts Mixtral; `mistral3`: later Mistral and Ministral.

Rows of q and k are in the order of llama.cpp's rotary embedding.
"""

from collections.abc import Mapping

from moebius_worker.checkpoint.gguf.families.common import (
    ATTENTION,
    DECODER,
    DENSE,
    MLP,
    MLP_NORM,
    QKV,
    SOFTMAX_NORMALISED,
    TOP,
    experts,
)
from moebius_worker.checkpoint.gguf.family import Family, Part, Parts
from moebius_worker.checkpoint.gguf.keys import Value, const, head_dim, need, tensor
from moebius_worker.checkpoint.gguf.order import part, rotary
from moebius_worker.checkpoint.gguf.rope import yarn_rope

_Q, _K = rotary("num_attention_heads"), rotary("num_key_value_heads")
_ATTENTION: Mapping[str, Parts] = {
    **ATTENTION,
    "attn_q": Part("self_attn.q_proj", rows=_Q),
    "attn_k": Part("self_attn.k_proj", rows=_K),
    "attn_qkv": (
        Part("self_attn.q_proj", rows=part(0, *QKV, then=_Q)),
        Part("self_attn.k_proj", rows=part(1, *QKV, then=_K)),
        Part("self_attn.v_proj", rows=part(2, *QKV)),
    ),
}
_BIASES: Mapping[str, Value] = {
    "attention_bias": tensor("blk.0.attn_q.bias"),
    "mlp_bias": tensor("blk.0.ffn_up.bias"),
}

LLAMA = Family(
    architecture="llama",
    class_name="LlamaForCausalLM",
    model_type="llama",
    config={**DECODER, **DENSE, **_BIASES},
    top=TOP,
    layer={**_ATTENTION, **MLP_NORM, **MLP},
    only={"expert_count": (0,), "expert_used_count": (0,)},
    applies=lambda keys: not keys.get("expert_count", 0),
)
MIXTRAL = Family(
    architecture="llama",
    class_name="MixtralForCausalLM",
    model_type="mixtral",
    config={
        **DECODER,
        "num_local_experts": need("expert_count"),
        "num_experts_per_tok": need("expert_used_count"),
        "intermediate_size": lambda keys: keys.get(
            "expert_feed_forward_length", keys.need("feed_forward_length")
        ),
        "sliding_window": const(None),
    },
    top=TOP,
    layer={
        **_ATTENTION,
        **MLP_NORM,
        "ffn_gate_inp": Part("block_sparse_moe.gate"),
        **experts("block_sparse_moe.experts", "w1", "w3", "w2"),
    },
    only=SOFTMAX_NORMALISED,
    applies=lambda keys: bool(keys.get("expert_count", 0)),
)
_NO_WINDOW: Mapping[str, Value] = {"sliding_window": const(None)}
# The temperature by which the attention of long texts is sharpened.
_TEMPERATURE = "attention.temperature_scale"
MISTRAL = Family(
    architecture="mistral3",
    class_name="MistralForCausalLM",
    model_type="mistral",
    config={**DECODER, **DENSE, **_NO_WINDOW},
    top=TOP,
    layer={**_ATTENTION, **MLP_NORM, **MLP},
    applies=lambda keys: not keys.get(_TEMPERATURE),
)
MINISTRAL3 = Family(
    architecture="mistral3",
    class_name="Ministral3ForCausalLM",
    model_type="ministral3",
    config={
        **DECODER,
        **DENSE,
        **_NO_WINDOW,
        "rope_parameters": yarn_rope(head_dim, 1.0, {"llama_4_scaling_beta": need(_TEMPERATURE)}),
    },
    top=TOP,
    layer={**_ATTENTION, **MLP_NORM, **MLP},
    applies=lambda keys: bool(keys.get(_TEMPERATURE)),
)
