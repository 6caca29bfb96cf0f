"""Qwen 2, Qwen 3 (dense and with experts), and OLMoE, which has Qwen 3's tensors."""

from collections.abc import Mapping

from moebius_worker.checkpoint.gguf.families.common import (
    ATTENTION,
    DECODER,
    DENSE,
    EXPERTS,
    MLP,
    MLP_NORM,
    QK_NORM,
    SOFTMAX,
    SOFTMAX_NORMALISED,
    TOP,
    experts,
)
from moebius_worker.checkpoint.gguf.family import Family, Part, Parts
from moebius_worker.checkpoint.gguf.keys import Value, const, need

_MOE: Mapping[str, Parts] = {
    **ATTENTION,
    **QK_NORM,
    **MLP_NORM,
    "ffn_gate_inp": Part("mlp.gate"),
    **experts("mlp.experts"),
}
_NO_WINDOW: Mapping[str, Value] = {"use_sliding_window": const(False), "sliding_window": const(None)}

QWEN2 = Family(
    architecture="qwen2",
    class_name="Qwen2ForCausalLM",
    model_type="qwen2",
    config={**DECODER, **DENSE, **_NO_WINDOW},
    top=TOP,
    layer={**ATTENTION, **MLP_NORM, **MLP},
)
QWEN3 = Family(
    architecture="qwen3",
    class_name="Qwen3ForCausalLM",
    model_type="qwen3",
    config={**DECODER, **DENSE, **_NO_WINDOW, "attention_bias": const(False)},
    top=TOP,
    layer={**ATTENTION, **QK_NORM, **MLP_NORM, **MLP},
)
QWEN3_MOE = Family(
    architecture="qwen3moe",
    class_name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    config={
        **DECODER,
        **EXPERTS,
        **_NO_WINDOW,
        "attention_bias": const(False),
        "intermediate_size": need("feed_forward_length"),
        "moe_intermediate_size": need("expert_feed_forward_length"),
        # llama.cpp normalises always, and so do all released models.
        "norm_topk_prob": const(True),
        "decoder_sparse_step": const(1),
        "mlp_only_layers": const([]),
    },
    top=TOP,
    layer=_MOE,
    only=SOFTMAX_NORMALISED,
)
OLMOE = Family(
    architecture="olmoe",
    class_name="OlmoeForCausalLM",
    model_type="olmoe",
    config={
        **DECODER,
        **EXPERTS,
        **DENSE,
        "norm_topk_prob": const(False),
        "clip_qkv": const(None),
        "attention_bias": const(False),
    },
    top=TOP,
    layer=_MOE,
    only={
        "expert_gating_func": (SOFTMAX,),
        "expert_weights_norm": (False,),
        "expert_weights_scale": (1.0, 0.0),
        "attention.clamp_kqv": (0.0,),
    },
)
