"""Triton's routers against the references."""

import pytest
import torch

from moebius_kernels import router as reference
from moebius_kernels.triton import router
from tests.kernels.paged_world import DEVICE

pytestmark = pytest.mark.usefixtures("poisoned")


def draw(*shape, seed=0, dtype=torch.float32):
    """No two alike in a row."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(shape[-1], generator=generator) for _ in range(shape[0])]
    return (torch.stack(rows) * 8.0 / shape[-1] - 4).to(DEVICE, dtype)


def check(name, logits, top_k, **options):
    got = getattr(router, name)(logits, top_k, **options)
    expected = getattr(reference, name)(logits, top_k, **options)
    assert (got.weights.dtype, got.experts.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(got.weights, expected.weights, atol=1e-6, rtol=1e-5)
    assert torch.equal(got.experts, expected.experts)


@pytest.mark.parametrize(
    ("experts", "top_k"), [(1, 1), (8, 2), (128, 8), (60, 4), (512, 10), (1000, 16), (1024, 1), (16, 16)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_and_how_many_are_chosen(experts, top_k, dtype):
    logits = draw(3, experts, dtype=torch.float32 if experts > 128 else dtype)
    check("topk_softmax", logits, top_k)
    check("topk_softmax", logits, top_k, renormalise=False, scale=2.5)
    check("softmax_topk", logits, top_k)
    check("sigmoid_topk", logits, top_k)


@pytest.mark.parametrize(
    ("experts", "groups", "top_groups"), [(160, 8, 3), (64, 8, 8), (32, 32, 6), (48, 3, 2), (256, 8, 4)]
)
def test_groups(experts, groups, top_groups):
    logits, bias = draw(5, experts), draw(1, experts, seed=1)[0] * 0.05
    kinds = {"groups": groups, "top_groups": top_groups, "scale": 2.5}
    for renormalise in (False, True):
        check("topk_softmax", logits, 6, renormalise=renormalise, **kinds)
        check("sigmoid_topk", logits, 6, renormalise=renormalise, **kinds)
        check("sigmoid_topk", logits, 6, renormalise=renormalise, bias=bias, **kinds)


def test_rows_of_a_wider_tensor_and_large_logits():
    wide = draw(4, 100) * 10
    check("topk_softmax", wide[:, 20:52], 4)
    check("sigmoid_topk", wide[:, 20:52] * 0.1, 4)
    assert router.topk_softmax(wide[:0], 4).experts.shape == (0, 4)


def test_of_equals_the_first():
    logits = torch.zeros(2, 24, device=DEVICE)
    for name in ("topk_softmax", "softmax_topk", "sigmoid_topk"):
        route = getattr(router, name)(logits, 3)
        assert route.experts.tolist() == [[0, 1, 2]] * 2
        torch.testing.assert_close(route.weights, torch.full((2, 3), 1 / 3, device=DEVICE))


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["topk_softmax", "softmax_topk", "sigmoid_topk"])
def test_a_faulty_row_goes_to_experts_that_exist_and_stays_alone(name, fault):
    logits = draw(3, 20)
    expected = getattr(router, name)(logits, 4)
    logits[1, 7] = fault
    got = getattr(router, name)(logits, 4)
    assert ((got.experts >= 0) & (got.experts < 20)).all()
    assert all(len(set(row)) == 4 for row in got.experts.tolist())
    for row in (0, 2):
        assert torch.equal(got.weights[row], expected.weights[row])
    if not (name == "sigmoid_topk" and fault == float("inf")):
        assert got.weights[1].isnan().any()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("topk_softmax", {}),
        ("topk_softmax", {"renormalise": False, "groups": 4, "top_groups": 2}),
        ("softmax_topk", {}),
        ("sigmoid_topk", {"groups": 4, "top_groups": 2}),
    ],
)
def test_a_row_that_is_nan_throughout_goes_to_no_expert(name, settings):
    logits = draw(4, 20)
    expected = getattr(router, name)(logits, 4, **settings)
    logits[1] = float("nan")
    logits[3, :19] = float("nan")
    got = getattr(router, name)(logits, 4, **settings)
    assert got.experts[1].tolist() == [-1] * 4
    assert got.weights[1].isnan().all()
    assert (got.experts[3] >= 0).all()
    for row in (0, 2):
        assert torch.equal(got.experts[row], expected.experts[row])
        assert torch.equal(got.weights[row], expected.weights[row])
