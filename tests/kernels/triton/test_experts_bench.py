"""The bench of routed experts: how tokens are routed, and what a row says."""

import pytest
import torch

pytest.importorskip("triton")
from moebius_kernels.registry import Device
from moebius_kernels.tuning import ExpertProduct
from tests.bench import gpu_experts
from tests.kernels.triton.matrices import FORMATS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = ExpertProduct(FORMATS["q4_0"], FORMATS["q4_0"], 32, 4, 256, 256)


def counts(trials: gpu_experts.ExpertTrials, tokens: int, seed: int = 0) -> torch.Tensor:
    """Of each expert's tokens, the most first."""
    _, route = trials.inputs(tokens, seed)
    assert all(len(set(row)) == SMALL.top_k for row in route.experts.tolist())
    torch.testing.assert_close(route.weights.sum(-1), torch.ones(tokens, device=DEVICE))
    return route.experts.flatten().bincount(minlength=SMALL.experts).sort(descending=True).values


def test_zipfs_law() -> None:
    uniform, zipf = (make(SMALL, 1, DEVICE) for make in gpu_experts.ROUTING.values())
    assert counts(uniform, 1000)[0] < 1.5 * 1000 * SMALL.top_k / SMALL.experts
    found = counts(zipf, 1000).float()
    # The first is chosen by nearly all; of the last ones, so likely that they hardly compete, 1 / r is left.
    assert found[0] > 600
    assert float(found[12:16].sum() / found[24:28].sum()) == pytest.approx(26 / 14, rel=0.25)
    experts = [zipf.inputs(1000, seed)[1].experts.flatten().bincount().argmax() for seed in range(8)]
    assert len(set(map(int, experts))) > 1


def test_a_row_has_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_experts, "DEVICE", DEVICE)
    monkeypatch.setattr(gpu_experts, "product_of", lambda shape, form: SMALL)
    monkeypatch.setattr(gpu_experts, "sets_of", lambda product, device: 1)
    monkeypatch.setattr(gpu_experts, "compile_here", lambda trials: None)
    monkeypatch.setattr(gpu_experts.ExpertTrials, "microseconds", lambda self, tokens, tiling: 2.5)
    one, two = gpu_experts.measure([("small", "q4_0")], [1], ["uniform", "zipf"])
    assert (one.routing, two.routing) == ("uniform", "zipf")
    assert one.hit == SMALL.top_k
    # Nibbles, and a bf16 for each 32 of them.
    nbytes = 4 * 3 * 256 * 256 * 18 / 32
    assert one.least == pytest.approx(1e6 * nbytes / gpu_experts.BANDWIDTH)
    assert one.error < 6e-3
    assert f"({one.least / 2.5:4.0%})" in gpu_experts.line(one)


@pytest.mark.parametrize(
    ("form", "tokens", "others"),
    [
        ("nvfp4_words", 512, []),
        ("nvfp4_words", 1024, ["triton_hopper"]),
        ("bf16", 8192, ["triton_hopper"]),
        ("mxfp4_words", 8192, ["triton_hopper", "triton_expanded"]),
        ("q4_k", 1024, ["triton_hopper"]),
        ("int4_words", 8192, ["triton_hopper", "triton_expanded"]),
        ("q6_k", 8192, ["triton_expanded"]),
    ],
)
def test_rows_are_of_what_a_preflight_tries(monkeypatch: pytest.MonkeyPatch, form, tokens, others) -> None:
    monkeypatch.setattr(gpu_experts, "device_here", lambda kind: Device("cuda", "NVIDIA H200", (9, 0)))
    product = gpu_experts.product_of("qwen3", form)
    tiling, *found = gpu_experts.ways(product, tokens).items()
    assert tiling[1] == gpu_experts.chosen(product, tokens)
    assert [name for name, _ in found] == others
