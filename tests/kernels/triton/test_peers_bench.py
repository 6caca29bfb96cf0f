"""What the bench beside other engines adds of its own."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from moebius_kernels.formats.codes import decode_e2m1
from moebius_kernels.formats.format import Format
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.int_group import IntGroup
from moebius_kernels.formats.mxfp4 import Mxfp4
from moebius_kernels.formats.nvfp4 import Nvfp4
from tests.bench import gpu_peers
from tests.bench.peers import marlin_experts
from tests.bench.peers.blocks import blocks_of, weighted_sum
from tests.bench.peers.layer import Shape, random_layer
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


def _as_marlin_reads(found: marlin_experts.Product) -> torch.Tensor:
    """fp32 [E, C, R]: words, lanes and halves as its kernel takes them apart for `mma.m16n8k16`."""
    bits = found.data.shape[-1] * 32 // (found.rows * 16)
    lane, tile, block, column = torch.meshgrid(
        torch.arange(32), torch.arange(4), torch.arange(2), torch.arange(4), indexing="ij"
    )
    # Of a fragment of B, register `column // 2` has in its halves two neighbours of a lane's columns.
    high, odd = column // 2, column % 2
    if bits == 4:
        word, shift = 4 * lane + tile, 4 * (high + 2 * block) + 16 * odd
    else:
        word, shift = 8 * lane + 2 * tile + block, 8 * high + 16 * odd
    rows, columns = 16 * tile + 8 * block + lane // 4, 8 * high + 2 * (lane % 4) + odd
    words = found.data.view(*found.data.shape[:2], found.rows // 64, -1)[..., word.flatten()]
    codes = torch.zeros(*words.shape[:3], 64, 16, dtype=torch.int64)
    codes[..., rows.flatten(), columns.flatten()] = (words >> shift.flatten()) & ((1 << bits) - 1)
    codes = codes.permute(0, 1, 4, 2, 3).reshape(len(words), found.columns, found.rows)
    # A lane's row of each 8 has its scales in one load.
    raw = found.scale
    if raw.dtype.itemsize == 1:
        raw = raw.view(torch.uint8).view(*raw.shape[:2], -1, 4)[..., [0, 2, 1, 3]].reshape(raw.shape)
    places = torch.arange(64)
    scale = torch.zeros_like(raw).view(*raw.shape[:2], -1, 64)
    scale[..., places // 8 + places % 8 * 8] = raw.view(scale.shape)
    scale = scale.view(raw.shape)
    if found.factor is not None:
        scale = (scale.int() << 7).short().view(torch.float16) * found.factor[:, None, None] * 2.0**-126
    elif found.scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.float8_e8m0fnu)
    spread = scale.float().repeat_interleave(found.columns // raw.shape[1], 1)
    if found.kind == marlin_experts._INT4:
        return (codes - 8) * spread
    if bits == 4:
        return decode_e2m1(codes.to(torch.uint8)) * spread
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * spread * 2.0**-120


@pytest.mark.parametrize(
    "form",
    [Nvfp4(), Mxfp4(), IntGroup(4, 128, False, torch.bfloat16), Fp8(128, 128)],
    ids=lambda form: form.name,
)
def test_marlin_reads_each_weight_where_it_lies(form: Format) -> None:
    shape = Shape(2, 1, 320, 160) if isinstance(form, Mxfp4) else Shape(2, 1, 384, 256)
    layer = random_layer(form, shape, torch.device("cpu"))
    hidden, inner = marlin_experts.padded(form, shape.hidden, shape.inner)
    down = _as_marlin_reads(marlin_experts.laid_out(layer.down, None, 1, hidden, inner)).mT
    gate_up = _as_marlin_reads(marlin_experts.laid_out(layer.gate_up[0], None, 2, inner, hidden)).mT
    gate_up = gate_up.view(2, 2, inner, hidden)
    for found, stored in (
        (down, layer.down.dequantize()[:, None]),
        (gate_up, layer.gate_up[0].dequantize().view(2, 2, shape.inner, shape.hidden)),
    ):
        found = found.view(2, stored.shape[1], *found.shape[-2:])
        rows, columns = stored.shape[-2:]
        # Factors of FP8 are rounded to bf16.
        torch.testing.assert_close(found[..., :rows, :columns], stored, rtol=2**-8, atol=0)
        assert not found[..., rows:, :].any()
        assert not found[..., columns:].any()


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
    # Its end is read, or the connection is gone before.
    assert failed.pop(("dies", "all")).startswith("its process died: ")
    assert failed == {
        ("one", "other"): "ImportError: no other",
        ("two", "other"): "ImportError: no other",
        ("one", "wrong"): "wrong numbers, error 5.0e-01",
        ("two", "wrong"): "wrong numbers, error 5.0e-01",
        ("one", "bad"): "RuntimeError: bad",
        ("two", "bad"): "RuntimeError: bad",
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
