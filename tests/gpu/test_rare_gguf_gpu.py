"""GGUF's types with tables or three values on a GPU: kernels read them once they are packed, in graphs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moebius_kernels.activations import SILU
from moebius_kernels.experts import ExpertWeights
from moebius_kernels.experts import routed_experts as reference
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.pack import pack
from moebius_kernels.linear import embedding
from moebius_kernels.router import topk_softmax
from moebius_kernels.triton.experts import routed_experts
from moebius_kernels.triton.linear import linear
from tests.gpu.rare_gguf import RARE, write_rare_gguf
from tests.gpu.test_engine_gpu import distance, load, logits_of, triton
from tests.kernels.formats.ggml_bytes import random_bytes, stored

# Between two products numbers are rounded to bf16, and so are IQ2's factors.
LIMIT = 8e-3
EXPERTS, HIDDEN, INNER = 16, 512, 256


def matrix(type_: Type, rows: int, columns: int, seed: int) -> StoredMatrix:
    blocks = columns // (128 if type_ == Type.Q1_0 else 256)
    data = random_bytes(type_, EXPERTS * rows, blocks, (-3, -2), seed)
    return stored(type_, data.reshape(EXPERTS, rows, -1))


def replayed(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    y.fill_(float("nan"))
    graph.replay()
    return y


@pytest.mark.parametrize("type_", RARE, ids=lambda type_: type_.name)
def test_experts_and_dense_products(type_: Type) -> None:
    gate_up, down = matrix(type_, 2 * INNER, HIDDEN, 1), matrix(type_, HIDDEN, INNER, 2)
    raw = ExpertWeights([gate_up], down)
    packed = ExpertWeights([pack(gate_up)], pack(down))
    for tokens in (1, 8, 128):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        route = topk_softmax(torch.randn(tokens, EXPERTS, device="cuda"), 4)
        y = replayed(lambda x=x, route=route: routed_experts(x, route, packed, SILU))
        expected = reference(x.float(), route, raw, SILU)
        assert (y.float() - expected).norm() < LIMIT * expected.norm(), tokens
        y = replayed(lambda x=x: linear(x, [packed.gate_up[0][3]]))
        expected = x.float() @ gate_up[3].dequantize().T
        assert (y.float() - expected).norm() < LIMIT * expected.norm(), tokens


@pytest.mark.parametrize("type_", [*RARE, Type.IQ4_NL, Type.IQ4_XS, Type.Q4_K, Type.Q6_K])
def test_rows_of_a_table(type_: Type) -> None:
    """Embeddings are looked up in the graph, too."""
    table = pack(stored(type_, random_bytes(type_, 64, 4, (-3, -2))))
    ids = torch.tensor([5, 0, 63], device="cuda")
    y = replayed(lambda: embedding(ids, table, torch.bfloat16))
    assert torch.equal(y.nan_to_num(), table.dequantize(torch.bfloat16)[ids].nan_to_num())


def test_a_model_with_all_of_them(tmp_path: Path) -> None:
    path = write_rare_gguf(tmp_path)
    expected = logits_of(load(path, "cpu", "float32"))
    limit = max(0.1, 2 * distance(logits_of(load(path, "cpu")), expected))
    runner = load(path, "cuda")
    runner.bind(triton())
    runner.capture(lambda size: size <= 4, lambda *_: None)
    found = logits_of(runner)
    assert found.isfinite().all()
    assert distance(found, expected) < limit
