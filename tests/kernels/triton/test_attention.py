"""Triton's paged attention against attention over plain tensors, one request and one query at a time."""

from dataclasses import replace

import pytest
import torch

from moebius_kernels import paged_attention as reference
from moebius_kernels.attention_plan import Span
from moebius_kernels.kv_pages import KvFormat
from moebius_kernels.triton import decode_attention as decode
from moebius_kernels.triton.decode_attention import DecodeTiling, decode_attention
from moebius_kernels.triton.paged_attention import paged_attention
from moebius_kernels.triton.write_kv import write_kv
from tests.kernels.paged_world import DEVICE, naive_attention
from tests.kernels.triton.device_world import DeviceWorld

pytestmark = pytest.mark.usefixtures("poisoned")

SINKS = torch.tensor([-3.0, 0.5, 2.0, 0.0, 8.0, -0.7], device=DEVICE)
ALL = {"scale": 0.5, "softcap": 2.0, "sinks": SINKS}
# First pieces, decodes (one of them longer than two splits), and pieces in the middle.
MIXED = [(0, 5), (40, 1), (16, 16), (0, 1), (140, 1), (31, 9)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """Programs take turns in the interpreter."""
    if DEVICE.type == "cpu":
        tiling = decode.decode_tiling
        monkeypatch.setattr(decode, "decode_tiling", lambda *sizes: replace(tiling(*sizes), programs=6))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "page_size"), [(4, 4, 7), (6, 2, 16), (9, 3, 1), (8, 1, 16), (20, 1, 16)]
)
def test_mixed_batch(heads, kv_heads, page_size):
    DeviceWorld(heads, kv_heads, page_size, num_pages=800).check(MIXED)


@pytest.mark.parametrize("window", [1, 33, 1000])
@pytest.mark.parametrize("scores", [{}, ALL])
def test_sliding_window(window, scores):
    DeviceWorld(6, 2, 8).check(MIXED, window=window, **scores)


@pytest.mark.parametrize("scores", [{"scale": 1.0}, {"softcap": 1.5}, {"sinks": SINKS}, ALL])
def test_scores(scores):
    DeviceWorld(6, 2, 7).check(MIXED, **scores)


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(24, 16), (16, 24), (80, 80), (192, 128), (96, 160), (64, 32)]
)
def test_widths_of_keys_and_values(key_dim, value_dim):
    DeviceWorld(6, 2, 8, key_dim=key_dim, value_dim=value_dim).check([(40, 1), (31, 9)], **ALL)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 16), (80, 64), (576, 512), (48, 24)])
def test_values_that_lie_in_the_keys(key_dim, value_dim):
    world = DeviceWorld(6, 1, 8, key_dim=key_dim, value_dim=value_dim, values_in_keys=True)
    world.check([(140, 1), (31, 9)], sinks=SINKS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scores", [{}, ALL])
def test_half_precision(dtype, scores):
    DeviceWorld(6, 2, 8, dtype=dtype).check(MIXED, tolerance=0.05, **scores)


@pytest.mark.parametrize("format", [KvFormat.FP8, KvFormat.INT8])
@pytest.mark.parametrize(("dim", "values_in_keys"), [(48, False), (64, False), (24, False), (96, True)])
def test_quantised_pages_are_read_as_the_reference_reads_them(format, dim, values_in_keys):
    world = DeviceWorld(6, 2, 8, key_dim=dim, value_dim=dim, format=format, values_in_keys=values_in_keys)
    plan, _, _ = world.run([(40, 1), (31, 9)])
    q = world.random(len(plan.slots), 6, dim)
    got = paged_attention(q, world.pages, plan, **ALL)
    expected = reference.paged_attention(q, world.pages, plan.expanded(torch.float32), **ALL)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_results_of_splits_are_put_together(splits):
    world = DeviceWorld(6, 2, 16)
    spans, expected, queries = [], [], []
    for length in (1, 47, 120):
        pages, k, v = world.request(length)
        world.write_kv(k, v, world.pages, world.plan([Span(0, length, pages)]))
        queries.append(world.random(1, 6, 32))
        spans.append(Span(length - 1, 1, pages))
        expected.append(naive_attention(queries[-1], k, v, length - 1, None, sinks=SINKS))
    plan = world.plan(spans)
    tiling = DecodeTiling(heads=16, keys=16, warps=1, stages=1, least=16, programs=splits * 3 * 2, per_root=0)
    for _ in range(2):
        output = torch.full((3, 6, 32), float("nan"), device=DEVICE)
        decode_attention(torch.cat(queries), world.pages, plan, output, 32**-0.5, None, SINKS, tiling)
        torch.testing.assert_close(output.double(), torch.cat(expected), atol=1e-5, rtol=1e-5)
        assert not plan.arrivals.any()


def test_padding_gives_zeros_and_writes_nothing():
    world = DeviceWorld(6, 2, 8)
    pages, k, v = world.request(20)
    world.write_kv(k[:19], v[:19], world.pages, world.plan([Span(0, 19, pages)]))
    plan = world.planner().plan([Span(19, 1, tuple(pages))], pad_to=5)
    before = world.pages.keys.numbers.clone()
    rows = world.random(5, 2, 32)
    rows[0], values = k[19], v[19:].expand(5, -1, -1)
    assert write_kv(rows, values, world.pages, plan).tolist() == [0] * 5
    changed = (before != world.pages.keys.numbers).flatten(2).any(-1).nonzero().tolist()
    assert changed == [[pages[2], 3]]
    q = world.random(5, 6, 32)
    got = paged_attention(q, world.pages, plan)
    torch.testing.assert_close(got[:1].double(), naive_attention(q[:1], k, v, 19, None), atol=1e-5, rtol=1e-5)
    assert not got[1:].any()


def test_pages_that_no_row_sees_are_not_read():
    world = DeviceWorld(6, 2, 8)
    taken = world.free[-sum(-(-(start + length) // 8) for start, length in MIXED) :]
    unused = sorted(set(range(200)) - set(taken))
    for rows in (world.pages.keys, world.pages.values):
        rows.numbers[unused] = float("nan")
    world.check(MIXED, window=20)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scores", [{}, {"sinks": SINKS}])
def test_a_faulty_query_stays_alone(scores, fault):
    world = DeviceWorld(6, 2, 8)
    plan, *_ = world.run([(9, 1), (11, 1), (0, 6)])
    q = world.random(8, 6, 32)
    expected = paged_attention(q, world.pages, plan, **scores)
    q[1, :, 3] = q[4, :, 3] = fault
    got = paged_attention(q, world.pages, plan, **scores)
    assert got.isnan().all(dim=-1).all(dim=-1).tolist() == [row in (1, 4) for row in range(8)]
    others = [0, 2, 3, 5, 6, 7]
    torch.testing.assert_close(got[others], expected[others])
