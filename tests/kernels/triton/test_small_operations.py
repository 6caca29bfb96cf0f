"""Triton's norms, activations and rotation against the references."""

import pytest
import torch

from moebius_kernels import activations as reference_activations
from moebius_kernels import fused as reference_fused
from moebius_kernels import rms_norm as reference_norms
from moebius_kernels import rotary as reference_rotary
from moebius_kernels.activations import GELU_TANH, SILU, ClampedSwiglu
from moebius_kernels.attention_plan import Span
from moebius_kernels.kv_pages import KvFormat
from moebius_kernels.rotary import Rotary, RotarySpec
from moebius_kernels.triton import rotary
from moebius_kernels.triton.activations import gated
from moebius_kernels.triton.rms_norm import add_rms_norm, gated_rms_norm, l2_norm, rms_norm
from moebius_kernels.triton.rotary import apply_rotary, rotate_and_write_kv
from tests.kernels.paged_world import DEVICE
from tests.kernels.triton.device_world import DeviceWorld
from tests.kernels.triton.test_write_kv import stored

pytestmark = pytest.mark.usefixtures("poisoned")

DTYPES = [torch.float32, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(got, expected):
    """As far as the last bit of half precision."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    tolerance = 1e-5 if got.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (2, 3, 128), (70, 5, 16), (1, 2880)])
@pytest.mark.parametrize(("weight", "offset"), [(None, 0.0), (torch.float32, 1.0), (torch.bfloat16, 0.0)])
def test_rms_norm(dtype, shape, weight, offset):
    x = 3 * draw(*shape, dtype=dtype)
    factor = None if weight is None else draw(shape[-1], seed=1, dtype=weight)
    close(rms_norm(x, factor, 1e-6, offset=offset), reference_norms.rms_norm(x, factor, 1e-6, offset=offset))


def test_norms_of_slices_and_of_rows_that_are_not_finite():
    wide = draw(5, 400)
    wide[1, 110], wide[3, 230], wide[4] = NAN, INF, 0.0
    heads = wide[:, 100:292].unflatten(1, (3, 64))
    weight = draw(64, seed=1)
    for x in (heads, heads.flip(0), wide[:, 100:164], heads.transpose(0, 1)):
        close(rms_norm(x, weight, 1e-6), reference_norms.rms_norm(x, weight, 1e-6))
    close(l2_norm(heads), reference_norms.l2_norm(heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_rms_norm(dtype, activation):
    x, z, weight = draw(7, 3, 48, dtype=dtype), draw(7, 200, seed=1, dtype=dtype), draw(48, seed=2)
    z = z[:, 50:194].unflatten(1, (3, 48))
    args = (x, z, weight, 1e-6, activation)
    close(gated_rms_norm(*args), reference_norms.gated_rms_norm(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 100, 2048])
def test_add_rms_norm(dtype, size):
    x, residual, weight = (draw(3, size, seed=seed, dtype=dtype) for seed in range(3))
    got = add_rms_norm(x, residual, weight[0], 1e-6, offset=1.0)
    expected = reference_fused.add_rms_norm(x, residual, weight[0], 1e-6, offset=1.0)
    assert torch.equal(got[0], expected[0])
    close(got[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH, ClampedSwiglu()])
@pytest.mark.parametrize("shape", [(1, 2), (3, 2 * 704), (2, 3, 10)])
def test_gated(dtype, activation, shape):
    x = 6 * draw(*shape, dtype=dtype)
    close(gated(x, activation), reference_activations.gated(x, activation))
    close(gated(x[:0], activation), reference_activations.gated(x[:0], activation))


@pytest.mark.parametrize("activation", [SILU, GELU_TANH, ClampedSwiglu()])
def test_gated_of_what_is_not_finite(activation):
    x = torch.tensor([[NAN, INF, -INF, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, NAN, INF, -INF]], device=DEVICE)
    close(gated(x, activation), reference_activations.gated(x, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "turning"), [(1, 64, 64), (5, 80, 20), (33, 128, 64), (2, 24, 6)])
def test_rotary(dtype, interleaved, heads, dim, turning):
    angles = Rotary(RotarySpec(turning, 1e4, interleaved=interleaved), DEVICE)(
        torch.tensor([0, 5, 70_000], device=DEVICE)
    )
    x = draw(3, heads * dim + 9, dtype=dtype)[:, 4:-5].unflatten(1, (heads, dim))
    x[1, 0, -1], x[2, 0, 0] = INF, NAN
    close(apply_rotary(x, angles), reference_rotary.apply_rotary(x, angles))


@pytest.mark.parametrize("few", [0, 1024])
@pytest.mark.parametrize("format", KvFormat)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turning"), [(8, 2, 32, 32), (9, 3, 80, 20), (40, 1, 64, 64)]
)
def test_rotate_and_write_kv(monkeypatch, format, normed, heads, kv_heads, dim, turning, few):
    monkeypatch.setattr(rotary, "_FEW", few)
    worlds = [
        DeviceWorld(heads, kv_heads, 8, num_pages=6, key_dim=dim, value_dim=dim, format=format)
        for _ in range(2)
    ]
    plan = worlds[0].plan([Span(5, 4, (4, 2)), Span(7, 1, (1,))])
    angles = Rotary(RotarySpec(turning, 1e4), DEVICE)(torch.tensor([5, 6, 7, 8, 7], device=DEVICE))
    rows = draw(5, (heads + 2 * kv_heads) * dim)
    rows[1, heads * dim + 3], rows[3, -1] = NAN, INF
    q, k, v = (
        part.unflatten(1, (-1, dim))
        for part in rows.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    )
    norms = (
        {"q_weight": draw(dim, seed=1), "k_weight": draw(dim, seed=2), "eps": 1e-6, "offset": 1.0}
        if normed
        else {}
    )
    got = rotate_and_write_kv(q, k, v, angles, worlds[0].pages, plan, **norms)
    expected = reference_fused.rotate_and_write_kv(
        q, k, v, angles, worlds[1].pages, plan.expanded(q.dtype), **norms
    )
    assert got.isnan().flatten(1).all(1).tolist() == [False, True, False, True, False]
    close(got, expected)
    places = torch.arange(6, device=DEVICE)
    for mine, theirs in zip(*(world.pages.gather(places, torch.float32) for world in worlds), strict=True):
        # A number between two codes may go to either.
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=2**-3 if format is KvFormat.FP8 else 0.02)
    if format is KvFormat.MODEL:
        assert torch.equal(stored(worlds[0].pages)[1], stored(worlds[1].pages)[1])
