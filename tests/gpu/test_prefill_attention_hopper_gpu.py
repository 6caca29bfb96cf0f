"""Attention that divides its labour, compiled, on awkward batches against attention over plain tensors."""

from dataclasses import dataclass

import pytest
import torch

from moebius_kernels.attention_plan import Span
from moebius_kernels.device_plan import AttentionPlanner, DeviceAttentionPlan
from moebius_kernels.kv_pages import KvFormat, KvPages

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs Hopper", allow_module_level=True)

from moebius_kernels.triton.hopper_attention import paged_attention
from moebius_kernels.triton.prefill_attention_hopper import prefill_attention

DEVICE = torch.device("cuda")
# Weights are rounded to bf16.
LIMIT = 0.006
# Requests of a step: (start, length) each.
BATCHES = {
    "short": [(0, 1), (0, 15), (0, 16), (0, 17), (0, 2)],
    "a tile": [(0, 127), (0, 128), (0, 129), (0, 1000)],
    "after a prefix": [(1000, 129), (16, 17), (128, 128), (4095, 300), (65, 640)],
    "with decodes": [(900, 1), (0, 257), (31, 1), (7000, 500), (127, 1)],
    "many": [(37 * index % 500, 1 + 61 * index % 400) for index in range(60)],
    "long": [(12000, 1500)],
}


@dataclass
class Step:
    q: torch.Tensor
    pages: KvPages
    plan: DeviceAttentionPlan
    sinks: torch.Tensor | None
    expected: torch.Tensor


def step(spans, heads=8, kv_heads=2, dim=128, page=16, window=None, sinks=False):
    """Requests whose pages are shuffled. Other pages hold NaN, and places behind a request's last key what
    would show."""
    generator = torch.Generator(DEVICE).manual_seed(len(spans) + heads)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    counts = [-(-(start + length) // page) for start, length in spans]
    pages = KvPages.allocate(
        KvFormat.MODEL, sum(counts) + 5, page, kv_heads, dim, dim, torch.bfloat16, DEVICE
    )
    free = torch.randperm(sum(counts) + 5).tolist()
    assert pages.values is not None
    stored = pages.keys.numbers, pages.values.numbers
    for numbers in stored:
        numbers.fill_(float("nan"))
    rows = sum(length for _, length in spans)
    # As it comes of a product: queries, keys and values of a row beside each other.
    q = draw(rows, (heads + 2 * kv_heads) * dim)[:, : heads * dim].unflatten(1, (heads, dim))
    sink = draw(heads) if sinks else None
    made, expected, row = [], [], 0
    for (start, length), count in zip(spans, counts, strict=True):
        own = torch.tensor([free.pop() for _ in range(count)], device=DEVICE)
        first = 0 if window is None else max(0, start - window + 1) // page
        keys, values = draw(start + length, kv_heads, dim), draw(start + length, kv_heads, dim)
        for numbers, given in zip(stored, (keys, values), strict=True):
            numbers[own[first:]] = 1e4
            slots = (own[:, None] * page + torch.arange(page, device=DEVICE)).flatten()[: start + length]
            numbers.view(-1, kv_heads, dim)[slots[first * page :]] = given[first * page :]
        made.append(Span(start, length, tuple([-1] * first + own.tolist()[first:])))
        expected.append(
            attention(q[row : row + length].float(), keys.float(), values.float(), start, window, sink)
        )
        row += length
    planner = AttentionPlanner(
        max_requests=len(spans),
        max_rows=rows,
        max_model_len=32768,
        page_size=page,
        window=window,
        device=DEVICE,
    )
    return Step(q, pages, planner.plan(made), sink, torch.cat(expected))


def attention(q, keys, values, start, window, sinks):
    heads, dim = q.shape[1:]
    keys, values = (rows.repeat_interleave(heads // rows.shape[1], 1) for rows in (keys, values))
    scores = torch.einsum("thd,shd->hts", q, keys) * dim**-0.5
    position = torch.arange(start, len(keys), device=DEVICE)[:, None]
    key = torch.arange(len(keys), device=DEVICE)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    scores.masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), dim=-1)
    return torch.einsum("hts,shd->thd", scores.softmax(-1)[..., : len(keys)], values)


def error_of(one):
    """Relative, of the rows of prompts; NaN if any row is."""
    output = torch.full(one.q.shape, float("nan"), dtype=one.q.dtype, device=DEVICE)
    prefill_attention(one.q, one.pages, one.plan, output, one.q.shape[-1] ** -0.5, one.sinks)
    rows = torch.cat([torch.full((span.length,), span.length > 1) for span in one.plan.spans]).to(DEVICE)
    # What is of no prompt stays as it is.
    assert output[~rows].isnan().all()
    got, expected = output[rows].float(), one.expected[rows]
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("batch", BATCHES)
def test_batches(batch):
    """Again and again, since races come and go."""
    one = step(BATCHES[batch])
    for _ in range(5):
        assert error_of(one) < LIMIT


MIXED = [(0, 130), (900, 1), (1500, 300), (0, 1025)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 128), (28, 4, 128), (64, 8, 64)])
def test_heads(heads, kv_heads, dim):
    assert error_of(step(MIXED, heads, kv_heads, dim)) < LIMIT


@pytest.mark.parametrize(("window", "sinks"), [(None, True), (128, True), (1, False), (1000, False)])
def test_windows_and_sinks(window, sinks):
    assert error_of(step(MIXED, window=window, sinks=sinks)) < LIMIT


@pytest.mark.parametrize("page", [8, 64, 256])
def test_pages(page):
    assert error_of(step(BATCHES["after a prefix"], page=page)) < LIMIT


def test_decodes_are_done_by_their_own_kernel():
    one = step(BATCHES["with decodes"], sinks=True)
    got = paged_attention(one.q, one.pages, one.plan, sinks=one.sinks)
    assert (got.float() - one.expected).norm() < LIMIT * one.expected.norm()


def test_the_same_each_time():
    one = step(BATCHES["many"], 32, 4)
    first = paged_attention(one.q, one.pages, one.plan)
    for _ in range(20):
        assert torch.equal(paged_attention(one.q, one.pages, one.plan), first)


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_faulty_query_stays_alone(fault):
    one = step([(0, 200), (77, 33)])
    expected = paged_attention(one.q, one.pages, one.plan)
    one.q[5, :, 3] = one.q[210, :, 100] = fault
    got = paged_attention(one.q, one.pages, one.plan)
    assert got.isnan().all(-1).all(-1).nonzero().flatten().tolist() == [5, 210]
    kept = [row for row in range(233) if row not in (5, 210)]
    assert torch.equal(got[kept], expected[kept])
