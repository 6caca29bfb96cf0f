"""Mixtral against transformers."""

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from tests.worker.engine.models.harness import check_bf16, check_family, write_random

SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
}
CASES = {
    "released": {},
    "tied, 9/3 heads": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "8 experts, top 3": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "window": {"sliding_window": 11},
}


def made(tmp_path, **config):
    model = MixtralForCausalLM(MixtralConfig(**(SIZES | config)))
    return write_random(tmp_path, model), model


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path, case):
    check_family(*made(tmp_path, **CASES[case]))


def test_bf16(tmp_path):
    check_bf16(*made(tmp_path))
