"""Which layers make the same calls."""

import torch
from gguf import GGMLQuantizationType as Type

from moebius_kernels.formats.ggml import Ggml
from moebius_worker.engine.models.kinds import kind_of
from moebius_worker.engine.models.moe import MoeConfig, ResidentExperts, Routing, SparseMoe
from moebius_worker.engine.models.parameters import Place

META = Place(torch.device("meta"), torch.bfloat16)


def experts(down: Type, bias: bool = False) -> SparseMoe:
    moe = SparseMoe(MoeConfig(256, 256, 4, 2, bias=bias), Routing("topk_softmax", {"top_k": 2}))
    assert isinstance(moe.experts, ResidentExperts)
    for matrix, type_ in ((moe.experts.gate_up, Type.Q4_K), (moe.experts.down, down)):
        matrix.allocate(dict.fromkeys(matrix.parts, Ggml(type_)), META)
    return moe


def test_layers_differ_in_the_forms_of_their_experts() -> None:
    """As in llama.cpp's Q4_K_M, where some layers have their down projections in Q6_K."""
    usual = kind_of(experts(Type.Q4_K))
    assert usual == kind_of(experts(Type.Q4_K))
    assert usual != kind_of(experts(Type.Q6_K))
    assert usual != kind_of(experts(Type.Q4_K, bias=True))
