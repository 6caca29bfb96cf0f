"""Paged attention against attention over plain tensors, one request and one query at a time."""

import random

import pytest
import torch

from moebius_kernels import attention_plan
from moebius_kernels.attention_plan import Span, plan_attention
from moebius_kernels.paged_attention import paged_attention, write_kv

HEAD_DIM = 32
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class World:
    """Requests with random keys and values, whose pages are scattered over the cache."""

    def __init__(self, heads, kv_heads, page_size, num_pages=200, seed=0, dtype=torch.float32):
        self.generator = torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.page_size, self.dtype = heads, kv_heads, page_size, dtype
        shape = (num_pages, page_size, kv_heads, HEAD_DIM)
        # Leftovers of earlier requests: large, so that one that is looked at shows.
        self.k_pages = torch.full(shape, 50.0, dtype=dtype, device=DEVICE)
        self.v_pages = torch.full(shape, 1e4, dtype=dtype, device=DEVICE)
        self.free = list(range(num_pages))
        random.Random(seed).shuffle(self.free)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator).to(DEVICE, self.dtype)

    def request(self, length):
        pages = [self.free.pop() for _ in range(-(-length // self.page_size))]
        shape = (length, self.kv_heads, HEAD_DIM)
        return pages, self.random(*shape), self.random(*shape)

    def plan(self, spans, window=None):
        return plan_attention(spans, page_size=self.page_size, window=window, dtype=self.dtype, device=DEVICE)

    def check(self, pieces, window=None, tolerance=1e-5):
        """`pieces`: (start, length) of one request each; what is before the start is already in the pages."""
        spans, queries, new_k, new_v, expected = [], [], [], [], []
        for start, length in pieces:
            pages, k, v = self.request(start + length)
            if start:
                past = self.plan([Span(0, start, pages)])
                write_kv(k[:start], v[:start], self.k_pages, self.v_pages, past)
            q = self.random(length, self.heads, HEAD_DIM)
            spans.append(Span(start, length, pages))
            queries.append(q)
            new_k.append(k[start:])
            new_v.append(v[start:])
            expected.append(naive_attention(q, k, v, start, window))
        plan = self.plan(spans, window)
        write_kv(torch.cat(new_k), torch.cat(new_v), self.k_pages, self.v_pages, plan)
        got = paged_attention(torch.cat(queries), self.k_pages, self.v_pages, plan)
        torch.testing.assert_close(got.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)
        return plan


def naive_attention(q, k, v, start, window):
    """q [T, heads, D] at positions from `start`; k, v [L, KV, D]. In fp64."""
    shared = q.shape[1] // k.shape[1]
    output = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for row in range(q.shape[0]):
        last = start + row + 1
        first = 0 if window is None else max(0, last - window)
        for head in range(q.shape[1]):
            keys, values = k[first:last, head // shared].double(), v[first:last, head // shared].double()
            scores = keys @ q[row, head].double() / HEAD_DIM**0.5
            output[row, head] = scores.softmax(0) @ values
    return output


MIXED = [(0, 5), (40, 1), (3, 1), (16, 16), (0, 1), (100, 1), (31, 9), (41, 1), (0, 48)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_mixed_batch(heads, kv_heads, page_size):
    World(heads, kv_heads, page_size, num_pages=400).check(MIXED)


@pytest.mark.parametrize("window", [1, 4, 16, 33, 1000])
def test_sliding_window(window):
    World(6, 2, 8).check(MIXED, window=window)


def test_window_skips_pages_before_it():
    plan = World(6, 2, 8).check([(95, 1), (60, 4)], window=10)
    assert len(plan.decodes[0].pages) == 2
    assert len(plan.chunks[0].pages) == 2


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


def test_bf16():
    World(6, 2, 8, dtype=torch.bfloat16).check(MIXED, tolerance=0.05)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_faulty_request_leaves_nothing_that_infects_others(fault):
    world = World(4, 2, 8)
    plan = world.plan([Span(0, 8, [world.free[-1]])])
    broken = torch.full((8, 2, HEAD_DIM), fault, device=DEVICE)
    write_kv(broken, broken, world.k_pages, world.v_pages, plan)
    # The next request gets that page and fills two of its places; the longer one beside it causes padding.
    world.check([(1, 1), (2, 1)])


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_were_not_kept_as_they_are_are_told(fault):
    world = World(4, 2, 8)
    pages, k, v = world.request(6)
    k[1, 1, 3] = v[4, 0, 0] = fault
    faults = write_kv(k, v, world.k_pages, world.v_pages, world.plan([Span(0, 6, pages)]))
    assert faults.isnan().tolist() == [False, True, False, False, True, False]
    assert faults[[0, 2, 3, 5]].tolist() == [0, 0, 0, 0]
