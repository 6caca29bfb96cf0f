"""What configs are understood, in old and new form, and what is refused by name."""

import pytest
import torch

from moebius_kernels.rotary import LinearScaling, Llama3Scaling, YarnScaling
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.config import read_decoder_config
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
MIXTRAL = CONFIG | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
META = Place(torch.device("meta"), torch.float32)


def read(**changes):
    return read_decoder_config(CONFIG | changes, default_theta=10000.0)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({}, None),
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2}, LinearScaling(2.0)),
        ({"rope_type": "llama3", **LLAMA3}, Llama3Scaling(8.0, 1.0, 4.0, 512)),
        ({"rope_type": "yarn", "factor": 1.0}, YarnScaling(1.0, 2048, 1.0)),
        (
            {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 16},
            YarnScaling(4.0, 2048, 1.0, beta_fast=16.0),
        ),
    ],
)
def test_old_and_new_rope_settings_are_the_same(parameters, scaling):
    new = read(rope_parameters={"rope_theta": 5e5, **parameters}).rope
    old = read(rope_theta=5e5, rope_scaling=parameters or None).rope
    older = read(
        rope_theta=5e5,
        rope_scaling={{"rope_type": "type"}.get(key, key): value for key, value in parameters.items()},
    ).rope
    assert new == old == older
    assert (new.theta, new.rotary_dim, new.scaling) == (5e5, 16, scaling)


def test_a_config_without_rope_settings_has_the_family_base():
    assert read().rope.theta == 10000.0
    assert build_model(MIXTRAL, META).config.rope.theta == 1e6


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "factor = None"),
        ({"partial_rotary_factor": 0.05}, "partial_rotary_factor = 0.05"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"hidden_size": None}, "hidden_size = None"),
        ({"vocab_size": True}, "vocab_size = True"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"sliding_window": -1}, "sliding_window = -1"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, named):
    with pytest.raises(CheckpointError) as refusal:
        read(**changes)
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"] * 2},
        {"rope_interleaved": False, "quantization_config": None, "logit_scale": 1.0},
        {"transformers.js_config": {}, "torch_dtype": "bfloat16", "attention_dropout": 0.1},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ],
)
def test_neutral_values_and_unrelated_keys_are_accepted(changes):
    read(**changes)


def test_unknown_architecture_is_refused_with_those_that_are_known():
    with pytest.raises(CheckpointError, match=r"JambaForCausalLM.*LlamaForCausalLM.*MixtralForCausalLM"):
        build_model(CONFIG | {"architectures": ["JambaForCausalLM"]}, META)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts_per_tok": 5}, "to 5 experts, but there are 4"),
        ({"num_local_experts": None}, "num_local_experts"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_mixtral_refuses_experts_that_make_no_sense(changes, named):
    with pytest.raises(CheckpointError, match=named):
        build_model(MIXTRAL | changes, META)


def test_weights_are_named_once_and_tied_ones_ignored():
    tied = build_model(MIXTRAL | {"tie_word_embeddings": True}, META)
    names = tied.slots()
    assert "lm_head.weight" not in names
    assert tied.ignores("lm_head.weight")
    assert names["model.layers.1.block_sparse_moe.experts.3.w2.weight"].shape == (64, 96)
    assert names["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    untied = build_model(MIXTRAL, META)
    assert "lm_head.weight" in untied.slots()
    assert not untied.ignores("lm_head.weight")
    assert untied.ignores("model.layers.0.self_attn.rotary_emb.inv_freq")
