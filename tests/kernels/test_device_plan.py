"""Plans on the device: what they say, and that a later plan finds only what it should in the tables."""

import random

import pytest
import torch

from moebius_kernels.attention_plan import Span, plan_attention
from moebius_kernels.device_plan import TILE_ROWS, AttentionPlanner, plan_states_on_device

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 4


def planner(window=None, requests=6, rows=900):
    return AttentionPlanner(
        max_requests=requests, max_rows=rows, max_model_len=2000, page_size=PAGE, window=window, device=DEVICE
    )


def same(got, expected):
    """Two plans of the reference."""
    assert torch.equal(got.slots, expected.slots)
    for mine, theirs in zip(got.decodes, expected.decodes, strict=True):
        assert torch.equal(mine.rows, theirs.rows)
        assert torch.equal(mine.pages, theirs.pages)
        assert mine.num_keys == theirs.num_keys
    for mine, theirs in zip(got.chunks, expected.chunks, strict=True):
        assert (mine.first_row, mine.last_row, mine.num_keys) == (
            theirs.first_row,
            theirs.last_row,
            theirs.num_keys,
        )
        assert torch.equal(mine.pages, theirs.pages)


@pytest.mark.parametrize("window", [None, 1, 9, 100])
def test_random_steps_say_what_the_references_plan_says(window):
    draw = random.Random(5)
    made = planner(window)
    requests = {}
    for _ in range(60):
        # Some requests leave, some come, some lose their pages and begin again.
        for name in [name for name in requests if draw.random() < 0.1]:
            del requests[name]
        while len(requests) < draw.randint(1, 6):
            requests[draw.random()] = [0, []]
        spans = []
        for state in requests.values():
            start, pages = state
            length = draw.choice((1, 1, 1, 7, 150)) if start else draw.choice((1, 20, 140))
            if start + length > 900 or draw.random() < 0.05:
                start, pages, length = 0, [], 3
            pages = pages + [draw.randrange(10_000) for _ in range(-(-(start + length) // PAGE) - len(pages))]
            gone = 0 if window is None else max(0, start - window + 1) // PAGE
            spans.append(Span(start, length, tuple([-1] * gone + pages[gone:])))
            state[:] = start + length, pages
        plan = made.plan(spans)
        assert plan.window == window
        expected = plan_attention(spans, page_size=PAGE, window=window, dtype=torch.float32, device=DEVICE)
        same(plan.expanded(torch.float32), expected)


def test_single_rows_come_first_and_tiles_that_see_much_too():
    spans = [Span(0, 300, tuple(range(75))), Span(20, 1, tuple(range(6))), Span(500, 2, tuple(range(126)))]
    plan = planner().plan(spans)
    assert plan.num_decodes == 1
    assert plan.first_rows.tolist() == [300, 0, 301]
    assert plan.num_rows.tolist() == [1, 300, 2]
    assert plan.num_keys.tolist() == [21, 300, 502]
    assert plan.tiles.tolist() == [[2, 0], [1, 2 * TILE_ROWS], [1, TILE_ROWS], [1, 0]]


def test_padding_does_not_exist_and_addresses_stay():
    made = planner()
    first = made.plan([Span(5, 1, (7, 3))] * 4, pad_to=4)
    plan = made.plan([Span(6, 1, (7, 3)), Span(0, 1, (9,))], pad_to=4)
    assert plan.num_decodes == 4
    assert plan.slots.tolist() == [14, 36, -1, -1]
    assert plan.num_keys.tolist() == [7, 1, 0, 0]
    for name in ("first_rows", "num_rows", "num_keys", "block_tables", "slots", "arrivals"):
        mine, theirs = getattr(first, name), getattr(plan, name)
        assert (mine.data_ptr(), mine.shape) == (theirs.data_ptr(), theirs.shape)


def test_only_new_pages_are_sent(monkeypatch):
    made, sent = planner(), []
    monkeypatch.setattr(
        AttentionPlanner, "_send", lambda self, changes: sent.append([pages for _, pages in changes])
    )
    made.plan([Span(6, 1, (7, 3)), Span(0, 1, (9,))])
    made.plan([Span(7, 1, (7, 3)), Span(1, 1, (9,))])
    made.plan([Span(8, 1, (7, 3, 5)), Span(2, 1, (8,))])
    assert [[pages for pages in step if pages] for step in sent] == [[(7, 3), (9,)], [], [(5,), (8,)]]


def test_chunks_of_states():
    plan = plan_states_on_device([Span(0, 130, ()), Span(3, 1, ()), Span(0, 5, ())], [4, 2, 6], DEVICE)
    assert plan.spans.tolist() == [[0, 130, 4, 0], [131, 136, 6, 3]]
    assert plan.chunks.tolist() == [[0, 64, 0, 4], [64, 128, 0, 4], [128, 130, 0, 4], [131, 136, 131, 6]]
    assert (plan.rows.tolist(), plan.slots.tolist()) == ([130], [2])


def test_all_parts_of_a_states_plan_are_aligned_as_kernels_are_compiled_for():
    plan = plan_states_on_device([Span(3, 1, ())] * 3 + [Span(0, 70, ())], [4, 2, 6, 1], DEVICE)
    assert (plan.rows.tolist(), plan.slots.tolist()) == ([0, 1, 2], [4, 2, 6])
    assert all(part.data_ptr() % 16 == 0 for part in (plan.rows, plan.slots, plan.spans, plan.chunks))


def test_a_states_plan_of_decodes_alone():
    plan = plan_states_on_device([Span(3, 1, ())], [4], DEVICE)
    assert (plan.rows.tolist(), plan.slots.tolist()) == ([0], [4])
    assert plan.spans.shape == plan.chunks.shape == (0, 4)
