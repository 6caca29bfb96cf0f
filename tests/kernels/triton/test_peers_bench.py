"""What the bench beside other engines adds of its own."""

import multiprocessing
import os

import pytest
import torch

pytest.importorskip("triton")
from tests.bench import gpu_peers
from tests.bench.peers.blocks import blocks_of, weighted_sum

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "size"),
    [(1, 2, 5, 8), (7, 3, 9, 12), (40, 4, 16, 16), (700, 4, 16, 88)],
)
def test_blocks(tokens: int, top_k: int, experts: int, size: int) -> None:
    torch.manual_seed(0)
    route = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    found = blocks_of(route.to(DEVICE), experts, size)
    pairs: list[int] = []
    owners: list[int] = []
    for expert in range(experts):
        own = (route.flatten() == expert).nonzero().flatten().tolist()
        for start in range(0, len(own), size):
            block = own[start : start + size]
            pairs += block + [tokens * top_k] * (size - len(block))
            owners.append(expert)
    assert found.rows.tolist() == [len(pairs)]
    assert found.pairs[: len(pairs)].tolist() == pairs
    assert found.experts[: len(owners)].tolist() == owners
    assert found.experts.max() < experts


def test_weighted_sum() -> None:
    outputs, weights = torch.randn(5, 3, 300, device=DEVICE).bfloat16(), torch.rand(5, 3, device=DEVICE)
    expected = torch.einsum("tkh,tk->th", outputs.float(), weights)
    torch.testing.assert_close(weighted_sum(outputs, weights).float(), expected, rtol=0.01, atol=0.01)


class _Contest:
    """Of the triton experts, a peer that is wrong, and one that raises; or of nobody."""

    def __init__(self, case: str, vllm: object) -> None:
        self.missing = {"other": "ImportError: no other"}
        if case == "dies":
            os._exit(3)
        if case == "raises":
            raise RuntimeError("first line\nsecond line")

    def compile(self, tokens):
        for count in tokens:
            yield count, "triton", 0.001
            yield count, "wrong", 0.5
            yield count, "bad", "RuntimeError: bad"

    def microseconds(self, tokens: int, name: str) -> float:
        assert name == "triton"
        return 10.0 * tokens


@pytest.mark.skipif(DEVICE.type == "cuda", reason="forks, which a process with a GPU must not")
def test_no_case_costs_another(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: fork)
    monkeypatch.setattr(gpu_peers, "Contest", _Contest)
    rows = list(gpu_peers.measured(["one", "dies", "raises", "two"], [1, 8], None))
    times = {(row.case, row.tokens): row.microseconds for row in rows if row.microseconds is not None}
    assert times == {("one", 1): 10, ("one", 8): 80, ("two", 1): 10, ("two", 8): 80}
    failed = {(row.case, row.backend): row.reason for row in rows if row.microseconds is None}
    assert failed == {
        ("one", "other"): "ImportError: no other",
        ("two", "other"): "ImportError: no other",
        ("one", "wrong"): "wrong numbers, error 5.0e-01",
        ("two", "wrong"): "wrong numbers, error 5.0e-01",
        ("one", "bad"): "RuntimeError: bad",
        ("two", "bad"): "RuntimeError: bad",
        ("dies", "all"): "its process died: EOFError: ",
        ("raises", "all"): "RuntimeError: first line",
    }
    assert "triton 80.0 (1.00) err 1e-03" in "\n".join(gpu_peers.table(rows))
