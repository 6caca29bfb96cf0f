"""Tiny sizes of the Qwen line with linear attention, at which every part of it shows in the logits."""

# Few sizes are powers of two; three value heads read a key head.
SIZES = {
    "vocab_size": 384,
    "hidden_size": 56,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "layer_types": ["linear_attention"] * 3 + ["full_attention", "linear_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 512,
    # An output of the delta rule may be near zero, and its norm then shows rounding: with 1e-6 here
    # transformers' own logits with and without its cache differ by up to 4e-4.
    "rms_norm_eps": 1e-4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
    "eos_token_id": None,
}
EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
    "num_experts": 7,
    "num_experts_per_tok": 3,
}
# Some heads remember a few tokens, some hundreds.
SCALES = {"embed": 1.0, "A_log": (-2.0, 1.5), "dt_bias": 1.0, "in_proj_a": 0.3, "conv1d": 1.0}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 56,
    "num_position_embeddings": 16,
}
