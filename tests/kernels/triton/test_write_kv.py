"""What Triton writes to pages against what the reference writes."""

import pytest
import torch

from moebius_kernels import paged_attention as reference
from moebius_kernels.attention_plan import Span
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.tensor_tree import map_tensors
from moebius_kernels.triton.write_kv import write_kv
from tests.kernels.paged_world import DEVICE
from tests.kernels.triton.device_world import DeviceWorld

pytestmark = pytest.mark.usefixtures("poisoned")


def on_the_cpu(value):
    """A GPU divides by a constant by multiplying with its inverse: its reference differs in the last bit."""
    return map_tensors(value, torch.Tensor.cpu)


def expected_write(k, v, pages, plan):
    """What the reference makes of the pages, and its result."""
    k, v, pages, plan = on_the_cpu((k, v, pages, plan.expanded(k.dtype)))
    return pages, reference.write_kv(k, v, pages, plan)


def stored(pages: KvPages):
    """All tensors of the pages, as integers."""
    parts = [rows for rows in (pages.keys, pages.values) if rows is not None]
    tensors = [tensor for rows in parts for tensor in (rows.numbers, rows.scales) if tensor is not None]
    return [tensor.view(torch.uint8).cpu() for tensor in tensors]


@pytest.mark.parametrize("format", KvFormat)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kv_heads", "key_dim", "value_dim", "values_in_keys"),
    [(2, 64, 64, False), (3, 40, 24, False), (1, 80, 64, True), (1, 576, 512, True), (5, 128, 32, False)],
)
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_the_same_bits_as_the_reference(format, dtype, kv_heads, key_dim, value_dim, values_in_keys, size):
    dims = {"key_dim": key_dim, "value_dim": value_dim, "values_in_keys": values_in_keys}
    world = DeviceWorld(kv_heads, kv_heads, 8, num_pages=9, dtype=dtype, format=format, **dims)
    plan = world.plan([Span(5, 11, (4, 2)), Span(7, 1, (7,)), Span(0, 3, (0,))])
    k = size * world.random(15, kv_heads, key_dim)
    v = None if values_in_keys else size * world.random(15, kv_heads, value_dim)
    k[2, 0, 5], k[4, 0], k[9, -1, 0] = float("nan"), 0.0, float("-inf")
    if v is not None:
        v[7, 0, 1] = float("inf")
    pages, faults = expected_write(k, v, world.pages, plan)
    got = write_kv(k, v, world.pages, plan)
    assert got.dtype == faults.dtype
    torch.testing.assert_close(got.cpu(), faults, equal_nan=True)
    for mine, theirs in zip(stored(world.pages), stored(pages), strict=True):
        assert torch.equal(mine, theirs)


def test_rows_that_are_slices_of_a_wider_tensor():
    world = DeviceWorld(2, 2, 8, num_pages=4)
    wide = world.random(6, 500)
    k, v = wide[:, 100:164].unflatten(1, (2, 32)), wide[:, 300:364].unflatten(1, (2, 32))
    plan = world.plan([Span(0, 6, (3,))])
    pages, _ = expected_write(k, v, world.pages, plan)
    write_kv(k, v, world.pages, plan)
    for mine, theirs in zip(stored(world.pages), stored(pages), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("format", "numbers"), [(KvFormat.FP8, 253), (KvFormat.INT8, 255)])
def test_every_number_of_the_format_is_met(format, numbers):
    world = DeviceWorld(4, 4, 8, num_pages=4, key_dim=256, value_dim=32, format=format)
    codes = torch.stack([torch.arange(256, device=DEVICE).roll(at) for at in range(3)]).to(torch.uint8)
    if format is KvFormat.FP8:
        k = codes.view(torch.float8_e4m3fn).float().nan_to_num(nan=0.0)[:, None]
        k = (0.9 + 0.1 * world.random(3, 4, 1)) * k
    else:
        k = codes.view(torch.int8).float().clamp(min=-127)[:, None].repeat(1, 4, 1)
        # The largest of each block makes its scale 1.
        k[..., ::32] = 127
    v = world.random(3, 4, 32)
    plan = world.plan([Span(0, 3, (2,))])
    expected, _ = expected_write(k, v, world.pages, plan)
    write_kv(k, v, world.pages, plan)
    written, expected = (
        pages.keys.numbers[2, :3].view(torch.uint8).cpu() for pages in (world.pages, expected)
    )
    assert torch.equal(written, expected)
    assert len(written.unique()) >= numbers
