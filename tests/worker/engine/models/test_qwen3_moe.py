"""Qwen3-MoE against transformers."""

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.worker.engine.models.harness import check_bf16, check_family, write_random

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
CASES = {
    "released": {},
    "weights as they are": {"norm_topk_prob": False},
    "some layers dense": {"mlp_only_layers": [1]},
    "every other layer sparse": {"decoder_sparse_step": 2},
    "tied": {"tie_word_embeddings": True},
}


def made(tmp_path, **config):
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(SIZES | config)))
    return write_random(tmp_path, model), model


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path, case):
    check_family(*made(tmp_path, **CASES[case]))


def test_bf16(tmp_path):
    check_bf16(*made(tmp_path))
