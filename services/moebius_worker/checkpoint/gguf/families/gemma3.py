"""Gemma 3: the text model. Norms, which the model adds to 1, are stored with that 1."""

from typing import Any

from moebius_worker.checkpoint.gguf.families.common import ATTENTION, DECODER, DENSE, MLP, TOP, windows
from moebius_worker.checkpoint.gguf.family import Family, Part
from moebius_worker.checkpoint.gguf.keys import Keys, const, get, need, num_layers
from moebius_worker.checkpoint.gguf.order import minus_one
from moebius_worker.checkpoint.gguf.rope import rope

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LAYERS_OF_27B = 62


def _norm(name: str) -> Part:
    return Part(name, values=minus_one)


def _ropes(keys: Keys) -> dict[str, Any]:
    return {
        _FULL: {**rope(keys), "rope_theta": keys.get("rope.freq_base", 1_000_000.0)},
        _SLIDING: {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)},
    }


def _query_scalar(keys: Keys) -> int:
    """The size of a head, but in the model of 27 billion parameters, which its number of layers tells."""
    if num_layers(keys) == _LAYERS_OF_27B:
        return int(keys.need("embedding_length") // keys.need("attention.head_count"))
    return int(keys.need("attention.key_length"))


GEMMA3 = Family(
    architecture="gemma3",
    class_name="Gemma3ForCausalLM",
    model_type="gemma3_text",
    config={
        **{key: value for key, value in DECODER.items() if key != "hidden_act"},
        **DENSE,
        "hidden_activation": const("gelu_pytorch_tanh"),
        "attention_bias": const(False),
        "rope_parameters": _ropes,
        "sliding_window": need("attention.sliding_window"),
        "layer_types": windows(6),
        "query_pre_attn_scalar": _query_scalar,
        "final_logit_softcapping": get("final_logit_softcapping"),
    },
    top={**TOP, "output_norm": _norm("model.norm")},
    layer={
        **ATTENTION,
        **MLP,
        "attn_norm": _norm("input_layernorm"),
        "attn_q_norm": _norm("self_attn.q_norm"),
        "attn_k_norm": _norm("self_attn.k_norm"),
        "post_attention_norm": _norm("post_attention_layernorm"),
        "ffn_norm": _norm("pre_feedforward_layernorm"),
        "post_ffw_norm": _norm("post_feedforward_layernorm"),
    },
)
