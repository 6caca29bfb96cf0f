"""Selection of blocks against a loop over the rows, and attention to what is selected."""

import pytest
import torch

from moebius_kernels.attention_plan import Span, plan_attention
from moebius_kernels.block_selection import select_blocks
from moebius_kernels.device_plan import AttentionPlanner
from moebius_kernels.kv_pages import KvFormat, KvPages
from moebius_kernels.paged_attention import write_kv
from tests.kernels.paged_world import DEVICE

PAGE, DIM, HEADS, TOP = 4, 16, 3, 3
# (start, length): decodes of several lengths, first pieces, pieces in the middle; some see few blocks only.
REQUESTS = [(0, 1), (5, 1), (40, 1), (61, 1), (0, 50), (33, 9), (2, 4), (100, 3)]


def draw(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def finish(averages):
    """Not linear, and another for each block."""
    return averages.tanh() * (1 + torch.arange(averages.shape[-2], device=DEVICE).unsqueeze(-1) % 3)


def world(block):
    """Plan, positions, queries, the pages of the index, and each request's keys."""
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0)).tolist()
    spans, keys, pages = (
        [],
        [],
        KvPages.allocate(KvFormat.MODEL, 150, PAGE, 1, DIM, DIM, torch.float32, DEVICE, values_in_keys=True),
    )
    # Leftovers of others: they would be selected.
    pages.keys.numbers.fill_(100.0)
    for number, (start, length) in enumerate(REQUESTS):
        end = start + length
        own = [order.pop() for _ in range(-(-end // PAGE))]
        spans.append(Span(start, length, own))
        keys.append(draw(end, 1, DIM, seed=number))
        whole = plan_attention(
            [Span(0, end, own)], page_size=PAGE, window=None, dtype=torch.float32, device=DEVICE
        )
        write_kv(keys[-1], None, pages, whole)
    plan = plan_attention(spans, page_size=PAGE, window=None, dtype=torch.float32, device=DEVICE)
    positions = torch.tensor([p for start, length in REQUESTS for p in range(start, start + length)])
    q = draw(len(positions), HEADS, DIM, seed=50)
    return spans, plan, positions.to(DEVICE), q, pages, keys


def expected(q, position, keys, block):
    """The numbers of the keys that a row sees."""
    whole = (position + 1) // block
    seen = set(range(whole * block, position + 1))
    if whole:
        averages = keys[: whole * block, 0].view(whole, block, DIM).mean(dim=1)
        scores = (q @ finish(averages).T).clamp(min=0).sum(dim=0).tolist()
        for best in sorted(range(whole), key=lambda index: -scores[index])[:TOP]:
            seen |= set(range(best * block, (best + 1) * block))
    return seen


def seen_by_rows(plan):
    rows = {}
    for group in plan.decodes:
        for index, row in enumerate(group.rows.tolist()):
            mask = torch.zeros(group.num_keys) if group.mask is None else group.mask[index, 0, 0].cpu()
            rows[row] = set((mask == 0).nonzero().flatten().tolist())
    for chunk in plan.chunks:
        length = chunk.last_row - chunk.first_row
        for index in range(length):
            mask = torch.zeros(chunk.num_keys) if chunk.mask is None else chunk.mask[index].cpu()
            visible = set((mask == 0).nonzero().flatten().tolist())
            if chunk.mask is None:
                visible &= set(range(chunk.num_keys - length + index + 1))
            rows[chunk.first_row + index] = visible
    return [rows[row] for row in range(len(rows))]


@pytest.mark.parametrize("block", [1, 3, 4, 7])
def test_each_row_sees_its_best_blocks_and_what_follows_the_last(block, monkeypatch):
    # Rows of long chunks are scored a few at a time.
    monkeypatch.setattr("moebius_kernels.block_selection.MAX_SCORES", 100)
    _, plan, positions, q, pages, keys = world(block)
    selected = select_blocks(q, positions, pages, plan, block=block, top=TOP, finish=finish)
    owner = [number for number, (_, length) in enumerate(REQUESTS) for _ in range(length)]
    rows = seen_by_rows(selected)
    for row, position in enumerate(positions.tolist()):
        assert rows[row] == expected(q[row], position, keys[owner[row]], block), f"row {row}"
    assert torch.equal(selected.slots, plan.slots)


def test_a_plan_for_the_device_selects_the_same():
    spans, plan, positions, q, pages, _ = world(4)
    planner = AttentionPlanner(
        max_requests=8, max_rows=100, max_model_len=200, page_size=PAGE, window=None, device=DEVICE
    )
    kinds = {"block": 4, "top": TOP, "finish": finish}
    there = select_blocks(q, positions, pages, planner.plan(spans), **kinds)
    assert seen_by_rows(there) == seen_by_rows(select_blocks(q, positions, pages, plan, **kinds))


def test_where_all_blocks_are_selected_the_plan_stays_as_it_is():
    _, plan, positions, q, pages, _ = world(4)
    assert select_blocks(q, positions, pages, plan, block=4, top=26, finish=finish) == plan


def test_of_equal_blocks_the_older_is_selected():
    _, plan, positions, _, pages, _ = world(4)
    q = torch.zeros(len(positions), HEADS, DIM, device=DEVICE)
    rows = seen_by_rows(select_blocks(q, positions, pages, plan, block=4, top=TOP, finish=finish))
    for row, position in zip(rows, positions.tolist(), strict=True):
        tail = set(range((position + 1) // 4 * 4, position + 1))
        assert row == set(range(min(4 * TOP, position + 1))) | tail
