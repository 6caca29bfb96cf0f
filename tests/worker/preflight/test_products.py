"""The products that are read off a model are those that it computes."""

from dataclasses import replace
from pathlib import Path

import pytest

from moebius_kernels.formats.pack import packed_format
from moebius_kernels.operations import REFERENCE
from moebius_kernels.tuning import DenseProduct, ExpertProduct
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.preflight.model import open_subject
from moebius_worker.preflight.products import products_of
from moebius_worker.preflight.subject import ProbeStep
from tests.worker.engine.models import test_deepseek as deepseek
from tests.worker.preflight.test_model import DATA, OPTIONS

STORED = [
    "gemma4_moe-nvfp4-modelopt",
    "gpt_oss-mxfp4",
    "mixtral-nvfp4-modelopt",
    "qwen3_moe-FP8_BLOCK-ct",
    "qwen3_moe_wide-W4A16-ct",
]


def computed(path: Path) -> set:
    """What a step of the model multiplies with."""
    found = set()

    def linear(x, blocks, bias=None):
        found.update(DenseProduct(packed(block.format), *block.shape) for block in blocks)
        return REFERENCE.linear(x, blocks, bias)

    def routed_experts(x, route, weights, *rest):
        experts, hidden, inner = weights.down.shape
        forms = packed(weights.gate_up[0].format), packed(weights.down.format)
        found.add(ExpertProduct(*forms, experts, route.experts.shape[1], hidden, inner))
        return REFERENCE.routed_experts(x, route, weights, *rest)

    options = OPTIONS | {"dtype": "bfloat16", "expand_weights": False, "max_running": 2}
    subject = open_subject(str(path), **options)
    subject.bind(replace(REFERENCE, linear=linear, routed_experts=routed_experts))
    subject.run(ProbeStep("prefill", 5))
    return found


def packed(format):
    return packed_format(format)


@pytest.mark.parametrize("name", STORED)
def test_products_are_those_that_a_step_computes(name):
    path = DATA / name
    found = products_of(open_checkpoint(str(path)))
    assert set(found) == computed(path)
    assert any(isinstance(one, ExpertProduct) for one in found)


@pytest.mark.parametrize("case", deepseek.CASES)
def test_latent_attention_and_shared_experts(tmp_path: Path, case: str):
    path = deepseek.write(tmp_path, deepseek.make(case))
    assert set(products_of(open_checkpoint(str(path)))) == computed(path)


def test_random_weights_have_the_form_that_is_asked_for():
    checkpoint = open_checkpoint(str(DATA / "qwen3_moe-FP8_BLOCK-ct"))
    for form, name in ((None, "fp8 128x128"), ("nvfp4", "nvfp4 words"), ("bf16", "bf16")):
        experts = [one for one in products_of(checkpoint, form) if isinstance(one, ExpertProduct)]
        assert {one.gate_up.name for one in experts} == {name}
