"""Rotary position embedding against transformers, and against turning complex numbers."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma4TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    Qwen3_5MoeTextConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.glm4_moe import modeling_glm4_moe
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

from moebius_kernels.rotary import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    Rotary,
    RotarySpec,
    YarnScaling,
    apply_rotary,
    yarn_magnitude,
)

POSITIONS = torch.tensor([0, 1, 2, 77, 511, 512, 1999])

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
CASES = {
    "default": ({}, None),
    "linear": ({"rope_type": "linear", "factor": 4.0}, LinearScaling(4.0)),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        Llama3Scaling(8.0, 1.0, 4.0, 512),
    ),
    "yarn": (YARN, YarnScaling(4.0, 512, 1.1386294361119891)),
    "yarn untruncated": (
        {**YARN, "attention_factor": 1.25, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        YarnScaling(4.0, 512, 1.25, beta_fast=16, beta_slow=2, truncate=False),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("head_dim", [32, 64])
def test_rotation_equals_transformers(name, head_dim):
    parameters, scaling = CASES[name]
    config = LlamaConfig(
        hidden_size=head_dim * 4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"} | parameters,
    )
    q = draw(len(POSITIONS), 4, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(q, POSITIONS.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(q, q, cos[0], sin[0])
    torch.testing.assert_close(rotate(q, RotarySpec(head_dim, 10000.0, scaling)), expected, atol=2e-4, rtol=0)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotate(x, spec, positions=POSITIONS):
    return apply_rotary(x, Rotary(spec, torch.device("cpu"))(positions))


def by_complex_numbers(x, frequencies, pairs):
    """x [T, heads, D] at POSITIONS, one pair (a, b) of numbers after the other, in fp64."""
    y = x.double().clone()
    for (a, b), frequency in zip(pairs, frequencies, strict=True):
        turn = torch.polar(torch.ones(len(x)).double(), POSITIONS.double() * frequency)
        turned = torch.complex(x[..., a].double(), x[..., b].double()) * turn.unsqueeze(1)
        y[..., a], y[..., b] = turned.real, turned.imag
    return y


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 16), (64, 32), (48, 24), (32, 32), (20, 2)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_only_the_first_numbers_turn(head_dim, rotary_dim, interleaved):
    x = draw(len(POSITIONS), 3, head_dim)
    half = rotary_dim // 2
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    expected = by_complex_numbers(x, [500.0 ** (-i / half) for i in range(half)], pairs)
    got = rotate(x, RotarySpec(rotary_dim, 500.0, interleaved=interleaved))
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    torch.testing.assert_close(got.double(), expected, atol=5e-4, rtol=0)


def test_partial_rotation_equals_glm():
    config = Glm4MoeConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    x = draw(len(POSITIONS), 4, 64)
    cos, sin = Glm4MoeRotaryEmbedding(config)(x, POSITIONS.unsqueeze(0))
    expected, _ = modeling_glm4_moe.apply_rotary_pos_emb(x, x, cos[0], sin[0])
    torch.testing.assert_close(rotate(x, RotarySpec(32, 10000.0)), expected, atol=2e-4, rtol=0)


def test_text_of_a_multimodal_rotation_equals_a_plain_one():
    """Qwen3.5's interleaved mrope: time, height and width of a text token are all its position."""
    config = Qwen3_5MoeTextConfig(
        head_dim=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )
    x = draw(len(POSITIONS), 4, 64)
    cos, sin = Qwen3_5MoeTextRotaryEmbedding(config)(x, POSITIONS.expand(3, 1, -1))
    expected, _ = modeling_glm4_moe.apply_rotary_pos_emb(x, x, cos[0], sin[0])
    torch.testing.assert_close(rotate(x, RotarySpec(16, 10000.0)), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("share", "factor"), [(0.25, 1.0), (0.25, 4.0), (1.0, 1.0), (0.3, 2.0)])
def test_proportional_rotation_equals_gemma4(share, factor):
    parameters = {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": share,
        "factor": factor,
    }
    config = Gemma4TextConfig(
        layer_types=["sliding_attention", "full_attention"],
        num_hidden_layers=2,
        head_dim=16,
        global_head_dim=64,
        rope_parameters={
            "full_attention": parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    rotary = Gemma4TextRotaryEmbedding(config)
    for kind, spec in {
        "full_attention": RotarySpec(64, 1e6, ProportionalScaling(share, factor)),
        "sliding_attention": RotarySpec(16, 1e4),
    }.items():
        x = draw(len(POSITIONS), 4, spec.rotary_dim)
        cos, sin = rotary(x, POSITIONS.unsqueeze(0), kind)
        expected = modeling_gemma4.apply_rotary_pos_emb(x, cos[0], sin[0])
        torch.testing.assert_close(rotate(x, spec), expected, atol=2e-4, rtol=0)


DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}


def test_interleaved_yarn_equals_deepseek():
    config = DeepseekV3Config(qk_rope_head_dim=32, rope_parameters=DEEPSEEK_YARN)
    x = draw(len(POSITIONS), 4, 32)
    cos, sin = DeepseekV3RotaryEmbedding(config)(x, POSITIONS.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb_interleave(x, x, cos[0], sin[0])
    factor = yarn_magnitude(40.0, 0.7) / yarn_magnitude(40.0, 1.3)
    got = rotate(x, RotarySpec(32, 10000.0, YarnScaling(40.0, 64, factor), interleaved=True))
    # Transformers moves the first of each pair to the front half; queries and keys alike, so it is the same.
    moved = torch.cat((got[..., 0::2], got[..., 1::2]), dim=-1)
    torch.testing.assert_close(moved, expected, atol=2e-4, rtol=0)


def test_magnitude_is_deepseeks():
    attention = DeepseekV3Attention(
        DeepseekV3Config(hidden_size=64, num_attention_heads=2, rope_parameters=DEEPSEEK_YARN), 0
    )
    expected = attention.qk_head_dim**-0.5 * yarn_magnitude(40.0, 1.3) ** 2
    assert attention.scaling == pytest.approx(expected)
    assert yarn_magnitude(1.0) == yarn_magnitude(0.5, 2.0) == 1.0


@pytest.mark.parametrize("interleaved", [False, True])
def test_bf16_is_turned_in_fp32(interleaved):
    x = draw(len(POSITIONS), 4, 32).bfloat16()
    spec = RotarySpec(16, 10000.0, interleaved=interleaved)
    got = rotate(x, spec)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), spec).bfloat16())
