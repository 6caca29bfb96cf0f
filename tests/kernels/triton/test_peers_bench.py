"""What the bench beside other engines adds of its own."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from tests.bench import gpu_peers
from tests.bench.peers.blocks import blocks_of, weighted_sum
from tests.without_interpreter import told

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
        pass

    def errors(self, tokens):
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
    monkeypatch.setattr(gpu_peers, "trials_of", lambda case, tokens: [])
    monkeypatch.setattr(gpu_peers, "compile_here", lambda trials: None)
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


def test_what_is_compiled_ahead_is_what_is_launched(tmp_path: Path) -> None:
    """With the activation and the biases of the model, which are in the kernels."""
    found = told("tests.kernels.triton.peers_keys", cache=tmp_path)
    ahead, measured = (set(found[name]) for name in ("ahead", "measured"))
    assert {key.split()[0] for key in measured} >= {"grouped_gemm", "_words_gemm", "_bf16_gemm", "_fp8_gemm"}
    assert ahead == measured


class _Compiled:
    """A peer that compiles by itself: all counts in one call, before any is computed."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def compile(self, pairs: list[int]) -> None:
        self.calls.append(pairs)

    def __call__(self, x: torch.Tensor, route: object, index: int) -> None:
        self.calls.append(len(x))
        raise RuntimeError("no kernel")


def test_peers_compute_everything_once_whatever_becomes_of_it() -> None:
    contest = object.__new__(gpu_peers.Contest)
    contest.shape = gpu_peers.SHAPES["qwen3"]
    contest._inputs = {(count, 0): (torch.empty(count, 1), None) for count in (1, 8, 32)}
    humming, seen = _Compiled(), []
    contest.peers = {"humming": humming, "vllm": lambda x, route, index: seen.append((len(x), route, index))}
    contest.compile([1, 8, 32])
    assert humming.calls == [[8, 64, 256], 1, 8, 32]
    assert sorted(seen) == [(1, None, 0), (8, None, 0), (32, None, 0)]
