"""GLM 4.5 and later with experts; and MiniMax M2, which has the same attention with Mixtral's names."""

from moebius_worker.checkpoint.gguf.families.common import (
    ATTENTION,
    DECODER,
    DENSE,
    MLP,
    MLP_NORM,
    QK_NORM,
    SIGMOID,
    SIGMOID_EXPERTS,
    TOP,
    experts,
    shared_expert,
)
from moebius_worker.checkpoint.gguf.family import Family, Part
from moebius_worker.checkpoint.gguf.keys import const, get, need, tensor
from moebius_worker.checkpoint.gguf.rope import partial_rope

GLM4_MOE = Family(
    architecture="glm4moe",
    class_name="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    config={
        **DECODER,
        **DENSE,
        **SIGMOID_EXPERTS,
        "rope_parameters": partial_rope(0.5),
        "attention_bias": tensor("blk.0.attn_q.bias"),
        "use_qk_norm": tensor("blk.0.attn_q_norm.weight"),
        "norm_topk_prob": get("expert_weights_norm", True),
        "num_nextn_predict_layers": const(0),
    },
    top=TOP,
    layer={
        **ATTENTION,
        **QK_NORM,
        **MLP,
        "post_attention_norm": Part("post_attention_layernorm"),
        "ffn_gate_inp": Part("mlp.gate"),
        "exp_probs_b.bias": Part("mlp.gate.e_score_correction_bias"),
        **experts("mlp.experts"),
        **shared_expert("mlp.shared_experts"),
    },
    only={"expert_gating_func": (SIGMOID,)},
)
MINIMAX_M2 = Family(
    architecture="minimax-m2",
    class_name="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    config={
        **DECODER,
        "rope_parameters": partial_rope(0.5),
        "rotary_dim": need("rope.dimension_count"),
        "intermediate_size": need("expert_feed_forward_length"),
        "num_local_experts": need("expert_count"),
        "num_experts_per_tok": need("expert_used_count"),
        "scoring_func": const("sigmoid"),
        "use_qk_norm": const(True),
    },
    top=TOP,
    layer={
        **ATTENTION,
        **QK_NORM,
        **MLP_NORM,
        "ffn_gate_inp": Part("block_sparse_moe.gate"),
        "exp_probs_b.bias": Part("block_sparse_moe.e_score_correction_bias"),
        **experts("block_sparse_moe.experts", "w1", "w3", "w2"),
    },
    only={"expert_gating_func": (SIGMOID,), "expert_weights_scale": (1.0, 0.0)},
    unread={"feed_forward_length"},
)
