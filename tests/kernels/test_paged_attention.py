"""Paged attention against attention over plain tensors, one request and one query at a time."""

import pytest
import torch

from moebius_kernels import attention_plan, paged_attention
from moebius_kernels.attention_plan import Span
from moebius_kernels.paged_attention import ready_for_any_shape, write_kv
from tests.kernels.paged_world import DEVICE, MIXED, World

SINKS = torch.tensor([-3.0, 0.5, 2.0, 0.0, 8.0, -0.7], device=DEVICE)

# Each kind of score that a family uses, for six query heads.
SCORES = {
    "plain": {},
    "scale": {"scale": 1.0},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "all": {"scale": 0.5, "softcap": 2.0, "sinks": SINKS},
}


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_mixed_batch(heads, kv_heads, page_size):
    World(heads, kv_heads, page_size, num_pages=400).check(MIXED)


@pytest.mark.parametrize("window", [1, 4, 16, 33, 1000])
@pytest.mark.parametrize("scores", SCORES)
def test_sliding_window(window, scores):
    World(6, 2, 8).check(MIXED, window=window, **SCORES[scores])


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("scores", SCORES)
def test_scores(kv_heads, scores):
    World(6, kv_heads, 7).check(MIXED, **SCORES[scores])


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(24, 16), (16, 24), (20, 20)])
def test_widths_of_keys_and_values(key_dim, value_dim, scores):
    World(6, 2, 8, key_dim=key_dim, value_dim=value_dim).check(MIXED, **SCORES[scores])


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("value_dim", [16, 24])
def test_values_that_lie_in_the_keys(value_dim, scores):
    world = World(6, 1, 8, key_dim=24, value_dim=value_dim, values_in_keys=True)
    assert world.pages.values is None
    world.check(MIXED, **SCORES[scores])


@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("limit", [1, 500, 3000])
def test_chunks_are_computed_in_tiles(monkeypatch, limit, window):
    monkeypatch.setattr(paged_attention, "MAX_SCORES", limit)
    World(6, 2, 8).check(MIXED, window=window, sinks=SINKS)


def test_large_scores_do_not_overflow():
    World(6, 2, 8).check(MIXED, scale=100.0, sinks=100 * SINKS, tolerance=1e-4)


def test_window_skips_pages_before_it():
    plan = World(6, 2, 8).check([(95, 1), (60, 4)], window=10)
    assert len(plan.decodes[0].pages) == 2
    assert len(plan.chunks[0].pages) == 2


@pytest.mark.parametrize("scores", ["plain", "sinks"])
def test_pages_that_no_row_sees_are_not_read(scores):
    world = World(6, 2, 8)
    _, got, _ = world.run(MIXED, window=20, **SCORES[scores])
    fresh = World(6, 2, 8)
    # All but page 0, which is read as padding, and those that the requests will get.
    taken = fresh.free[-sum(-(-(start + length) // 8) for start, length in MIXED) :]
    unused = sorted(set(range(1, 200)) - set(taken))
    for rows in (fresh.pages.keys, fresh.pages.values):
        rows.numbers[unused] = float("nan")
    _, again, expected = fresh.run(MIXED, window=20, **SCORES[scores])
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(got, again)


def test_long_chunk_whose_first_keys_are_outside_every_window():
    World(2, 1, 16).check([(0, 1200)], window=40)


def test_decodes_of_similar_length_are_one_group():
    plan = World(6, 2, 8).check([(40, 1), (60, 1), (70, 1), (69, 1)])
    assert len(plan.decodes) == 1
    assert plan.decodes[0].mask is not None


def test_equal_lengths_need_no_mask():
    plan = World(6, 2, 8).check([(40, 1)] * 3)
    assert plan.decodes[0].mask is None


def test_padding_at_most_doubles_the_keys():
    pieces = [(start, 1) for start in (0, 1, 3, 9, 10, 30, 100, 300, 310)]
    plan = World(2, 1, 4).check(pieces)
    gathered = sum(len(group.rows) * group.num_keys for group in plan.decodes)
    assert gathered <= 2 * sum(start + 1 for start, _ in pieces)


def test_groups_are_bounded(monkeypatch):
    monkeypatch.setattr(attention_plan, "MAX_GROUP_KEYS", 100)
    plan = World(2, 1, 4).check([(40, 1)] * 5 + [(200, 1)])
    assert sorted(len(group.rows) for group in plan.decodes) == [1, 1, 2, 2]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype, scores):
    World(6, 2, 8, dtype=dtype).check(MIXED, tolerance=0.05, **SCORES[scores])


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scores", ["plain", "sinks"])
def test_a_faulty_request_leaves_nothing_that_infects_others(fault, scores):
    world = World(6, 2, 8)
    plan = world.plan([Span(0, 8, [world.free[-1]])])
    broken = torch.full((8, 2, 32), fault, device=DEVICE)
    write_kv(broken, broken, world.pages, plan)
    # The next request gets that page and fills two of its places; the longer one beside it causes padding.
    world.check([(1, 1), (2, 1)], **SCORES[scores])


@pytest.mark.parametrize("scores", ["plain", "sinks"])
def test_a_faulty_query_stays_alone(scores):
    world = World(6, 2, 8)
    plan, *_ = world.run([(9, 1), (11, 1), (0, 6)], **SCORES[scores])
    q = world.random(8, 6, 32)
    expected = paged_attention.paged_attention(q, world.pages, plan, **SCORES[scores])
    q[1] = q[4] = float("nan")
    got = paged_attention.paged_attention(q, world.pages, plan, **SCORES[scores])
    assert got.isnan().any(dim=-1).any(dim=-1).tolist() == [row in (1, 4) for row in range(8)]
    others = [0, 2, 3, 5, 6, 7]
    torch.testing.assert_close(got[others], expected[others])


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_were_not_kept_as_they_are_are_told(fault):
    world = World(4, 2, 8)
    pages, k, v = world.request(6)
    k[1, 1, 3] = v[4, 0, 0] = fault
    faults = write_kv(k, v, world.pages, world.plan([Span(0, 6, pages)]))
    assert faults.isnan().tolist() == [False, True, False, False, True, False]
    assert faults[[0, 2, 3, 5]].tolist() == [0, 0, 0, 0]


def test_on_a_gpu_nothing_is_built_for_each_shape():
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with ready_for_any_shape(is_cuda=True):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        # Which takes whatever the others do not.
        assert torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
