"""Lists of modules as configs have them."""

import pytest

from moebius_worker.engine.weights.schemes.patterns import matcher


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "lm_head_x", False),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.1.mlp.gate", "model.layers.11.mlp.gate", False),
        # The last word alone, as AWQ's lists have it.
        ("gate", "model.layers.0.mlp.gate", True),
        ("gate", "model.layers.0.mlp.experts.3.gate_proj", False),
        # A module that the layer is in.
        ("model.layers.0.self_attn", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.12.self_attn.q_proj", True),
        ("model.layers.*.self_attn", "model.layers.12.mlp.down_proj", False),
        ("model.layers.0.router*", "model.layers.0.router.proj", True),
        ("model.layers.0.router*", "model.layers.1.router.proj", False),
        ("*.mlp.gate", "model.layers.0.mlp.gate", True),
        ("*lm_head*", "lm_head", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate", True),
        ("re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", False),
        ("re:mlp", "model.layers.0.mlp.gate", False),
        # As multimodal checkpoints call what is named without their prefix here.
        ("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("language_model.model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
        ("language_model.lm_head", "lm_head", True),
        ("re:model.language_model.layers.*gate$", "model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate", True),
        ("model.visual*", "model.layers.0.mlp.gate", False),
    ],
)
def test_a_pattern_names_a_module_or_what_it_is_in(pattern: str, module: str, matches: bool):
    assert matcher([pattern])(module) is matches
    assert matcher(["something.else", pattern, "re:nothing"])(module) is matches


def test_no_patterns_match_nothing():
    assert not matcher([])("lm_head")
