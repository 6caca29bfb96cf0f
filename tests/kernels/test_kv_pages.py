"""Formats of keys and values: what they take, and how far they are from what was written."""

import psutil
import pytest
import torch

from moebius_kernels.attention_plan import Span
from moebius_kernels.kv_pages import KvFormat, KvPages, bytes_per_page
from moebius_kernels.paged_attention import write_kv
from tests.kernels.paged_world import DEVICE, MIXED, World

QUANTISED = [KvFormat.FP8, KvFormat.INT8]


def pages_of(format, dim=64, kv_heads=2, num_pages=4, dtype=torch.float32, **options):
    return KvPages.allocate(format, num_pages, 8, kv_heads, dim, dim, dtype, DEVICE, **options)


def kept(format, rows):
    """Rows [T, KV, D] as they are read again."""
    pages = pages_of(format, rows.shape[-1], rows.shape[1], num_pages=-(-len(rows) // 8), dtype=rows.dtype)
    pages.keys.write(rows, torch.arange(len(rows), device=DEVICE))
    everything = torch.arange(-(-len(rows) // 8), device=DEVICE)
    return pages.gather(everything, torch.float32)[0][: len(rows)]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        # Of a page of 16 tokens and 2 heads: keys of 40 numbers, values of 64.
        (KvFormat.MODEL, 16 * 2 * (40 + 64) * 2),
        (KvFormat.FP8, 16 * 2 * (40 + 4 + 64 + 4)),
        (KvFormat.INT8, 16 * 2 * (40 + 2 * 2 + 64 + 2 * 2)),
    ],
)
def test_bytes_of_a_page(format, expected):
    assert bytes_per_page(format, 16, 2, 40, 64, torch.bfloat16) == expected


@pytest.mark.parametrize("format", KvFormat)
@pytest.mark.parametrize("values_in_keys", [False, True])
def test_a_page_takes_what_was_said(format, values_in_keys):
    sizes = (16, 3, 40, 24, torch.bfloat16)
    pages = KvPages.allocate(format, 5, *sizes, DEVICE, values_in_keys=values_in_keys)
    tensors = [
        tensor
        for rows in (pages.keys, pages.values)
        if rows is not None
        for tensor in (rows.numbers, rows.scales)
        if tensor is not None
    ]
    said = bytes_per_page(format, *sizes, values_in_keys=values_in_keys)
    assert sum(tensor.nbytes for tensor in tensors) == 5 * said


@pytest.mark.parametrize("format", KvFormat)
def test_pages_are_zero_at_first(format):
    keys, values = pages_of(format).gather(torch.arange(4, device=DEVICE), torch.float32)
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_models_format_keeps_every_bit(dtype):
    rows = draw(13, 2, 24).to(dtype)
    assert torch.equal(kept(KvFormat.MODEL, rows), rows.float())


@pytest.mark.parametrize("dim", [1, 24, 32, 80, 576])
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e6, 1e30])
def test_int8_is_within_half_a_step_of_each_block(dim, size):
    rows = size * draw(9, 2, dim)
    read = kept(KvFormat.INT8, rows)
    for first in range(0, dim, 32):
        block, got = rows[..., first : first + 32], read[..., first : first + 32]
        step = block.abs().amax(dim=-1, keepdim=True) / 127
        # Scales are rounded to 8 bits, so that steps may be 1/256 longer.
        assert ((got - block).abs() <= 0.5 * step * (1 + 1 / 128)).all()


@pytest.mark.parametrize("dim", [1, 24, 64, 576])
@pytest.mark.parametrize("size", [1e-30, 1e-4, 1.0, 1e6, 1e30])
def test_fp8_keeps_three_bits_of_each_number(dim, size):
    rows = size * draw(9, 2, dim)
    error = (kept(KvFormat.FP8, rows) - rows).abs()
    # e4m3: half of 2^-3 of the number's power of two, or half of 2^-9 where it is too small for that.
    step = rows.abs().amax(dim=-1, keepdim=True) / 448
    assert (error <= (rows.abs() * (2**-4 + 1e-6)).maximum(step * 2**-10 * (1 + 1e-3))).all()


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-42, 1.2e-38, 3.4e38])
def test_the_smallest_and_the_largest_numbers_stay_finite(format, size):
    rows = torch.full((3, 2, 48), size, device=DEVICE)
    rows[1, 0] *= -1
    read = kept(format, rows)
    assert read.isfinite().all()
    assert (read - rows).abs().max() <= max(0.07 * size, 1e-38)


@pytest.mark.parametrize("format", QUANTISED)
def test_a_large_number_coarsens_its_own_token_and_head_only(format):
    rows = draw(6, 2, 64)
    alone = kept(format, rows)
    rows[3, 1, 5] = 1e5
    together = kept(format, rows)
    together[3, 1] = alone[3, 1]
    assert torch.equal(together, alone)


@pytest.mark.parametrize("format", QUANTISED)
def test_reading_and_writing_again_changes_nothing(format):
    once = kept(format, draw(20, 2, 96))
    torch.testing.assert_close(
        kept(format, once), once, atol=0, rtol=1e-6 if format == KvFormat.FP8 else 1e-2
    )


# Root-mean-square error of the output relative to its own size, for unit normal queries, keys and values
# in heads of 128; what bf16 keys and values cost is in the first line, measured, not assumed.
@pytest.mark.parametrize(
    ("format", "smallest", "largest"),
    [(KvFormat.MODEL, 0.001, 0.003), (KvFormat.FP8, 0.02, 0.04), (KvFormat.INT8, 0.004, 0.009)],
)
@pytest.mark.parametrize("scores", [{}, {"sinks": torch.tensor([-1.0, 0.0, 1.0, 2.0], device=DEVICE)}])
def test_error_of_attention(format, smallest, largest, scores):
    world = World(4, 2, 16, key_dim=128, value_dim=128, dtype=torch.bfloat16, format=format)
    _, got, expected = world.run(MIXED, **scores)
    error = ((got - expected).square().mean() / expected.square().mean()).sqrt().item()
    assert smallest < error < largest


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
def test_faults_are_told_and_not_kept(format, fault):
    world = World(4, 2, 8, format=format)
    pages, k, v = world.request(4)
    k[1, 1, 3] = v[2, 0, 0] = fault
    faults = write_kv(k, v, world.pages, world.plan([Span(0, 4, pages)]))
    assert faults.isnan().tolist() == [False, True, True, False]
    for rows in world.pages.gather(torch.tensor(pages, device=DEVICE), torch.float32):
        assert rows.isfinite().all()


@pytest.mark.parametrize("format", QUANTISED)
def test_other_places_are_left_alone(format):
    pages = pages_of(format)
    pages.keys.write(draw(32, 2, 64), torch.arange(32, device=DEVICE))
    before = pages.gather(torch.arange(4, device=DEVICE), torch.float32)[0]
    pages.keys.write(draw(2, 2, 64, seed=1), torch.tensor([5, 17], device=DEVICE))
    after = pages.gather(torch.arange(4, device=DEVICE), torch.float32)[0]
    changed = (before != after).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert changed == [5, 17]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="memory of a GPU is not lazy")
def test_memory_is_taken_when_it_is_written():
    process = psutil.Process()
    before = process.memory_info().rss
    pages = pages_of(KvFormat.MODEL, dim=1024, num_pages=1 << 14)
    assert pages.keys.numbers.nbytes == 1 << 30
    pages.keys.write(draw(1, 2, 1024), torch.tensor([100_000]))
    assert process.memory_info().rss - before < 1 << 26
