"""Rotary angles and root-mean-square norm against transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from moebius_kernels.rms_norm import rms_norm
from moebius_kernels.rotary import (
    LinearScaling,
    Llama3Scaling,
    Rotary,
    RotarySpec,
    YarnScaling,
    apply_rotary,
)

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
    positions = torch.tensor([0, 1, 2, 77, 511, 512, 1999])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(positions), 4, head_dim, generator=generator)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(q, q, cos[0], sin[0])
    angles = Rotary(RotarySpec(head_dim, 10000.0, scaling), torch.device("cpu"))(positions)
    torch.testing.assert_close(apply_rotary(q, angles), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rms_norm_equals_transformers(dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    norm = LlamaRMSNorm(48, eps=1e-3)
    norm.weight.data = torch.randn(48, generator=generator)
    norm = norm.to(dtype)
    x = (3 * torch.randn(5, 48, generator=generator)).to(dtype)
    y = rms_norm(x, norm.weight, 1e-3)
    assert y.dtype == dtype
    torch.testing.assert_close(y, norm(x), atol=tolerance, rtol=tolerance)
