"""Dense families against transformers: Llama, Mistral, Qwen2, Qwen3."""

import pytest
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.worker.engine.models.harness import check_bf16, check_family, write_random

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one head a KV head": ("llama", {"num_key_value_heads": 4}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, own head size": ("llama", {"head_dim": 32}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": 4096}),
    "mistral, short window": ("mistral", {"sliding_window": 11}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"sliding_window": 5, "use_sliding_window": False}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
}


def made(tmp_path, family, **config):
    config_class, model_class = FAMILIES[family]
    model = model_class(config_class(**(SIZES | config)))
    return write_random(tmp_path, model), model


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path, case):
    family, config = CASES[case]
    check_family(*made(tmp_path, family, **config))


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16(tmp_path, family):
    check_bf16(*made(tmp_path, family))
