"""OLMoE against transformers."""

import pytest
from transformers import OlmoeConfig, OlmoeForCausalLM

from tests.worker.engine.models.harness import check_bf16, check_family, write_random

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 512,
    "eos_token_id": None,
}
CASES = {
    "released": {"num_key_value_heads": 4},
    "grouped heads": {},
    "renormalised": {"norm_topk_prob": True},
}


def made(tmp_path, **config):
    model = OlmoeForCausalLM(OlmoeConfig(**(SIZES | config)))
    return write_random(tmp_path, model), model


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path, case):
    check_family(*made(tmp_path, **CASES[case]))


def test_bf16(tmp_path):
    check_bf16(*made(tmp_path))
