"""Gemma 3 against transformers."""

import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from tests.worker.engine.models.harness import check_bf16, check_family, write_random

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 9,
    "query_pre_attn_scalar": 20,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LINEAR = {
    FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
CASES = {
    "released": {},
    "six layers by the pattern": {"num_hidden_layers": 6, "layer_types": None},
    "longer context": {"rope_parameters": LINEAR},
    "untied": {"tie_word_embeddings": False},
}


def made(tmp_path, **config):
    model = Gemma3ForCausalLM(Gemma3TextConfig(**(SIZES | config)))
    return write_random(tmp_path, model), model


@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path, case):
    check_family(*made(tmp_path, **CASES[case]))


def test_bf16(tmp_path):
    check_bf16(*made(tmp_path))
