"""Qwen3-Next against transformers."""

import pytest
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.worker.engine.models.harness import check_bf16, check_chunks, check_family, load, write_random
from tests.worker.engine.models.qwen_world import EXPERTS, SCALES, SIZES

CASES = {
    "as many key heads as value heads": {"linear_num_key_heads": 9},
    "weights as they are": {"norm_topk_prob": False},
    "some layers dense": {"mlp_only_layers": [1]},
    "every other layer sparse": {"decoder_sparse_step": 2},
}


def made(path, **config):
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**(SIZES | EXPERTS | config)))
    # What the decays are made of is a part of in_proj_ba here.
    return write_random(path, model, scales=SCALES | {"in_proj_ba": 0.3}), model.eval()


def test_family(tmp_path):
    check_family(*made(tmp_path))


def test_bf16(tmp_path):
    check_bf16(*made(tmp_path))


@pytest.mark.parametrize("case", CASES)
def test_variants(tmp_path, case):
    path, model = made(tmp_path, **CASES[case])
    check_chunks(load(path), model)
