"""Pairs in the order of their slots, against a sort."""

import pytest
import torch

triton = pytest.importorskip("triton")
from moebius_kernels.triton import align as module  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def expected(slots, num_slots, tokens):
    order = torch.where(slots < 0, num_slots, slots).argsort(stable=True)
    tiles, first = [], 0
    for slot in range(num_slots):
        count = int((slots == slot).sum())
        tiles += [[slot, first + at, first + min(at + tokens, count)] for at in range(0, count, tokens)]
        first += count
    return order.int(), tiles


def skewed(count, num_slots, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator) ** 3 * (num_slots + 1)).long() - 1


CASES = {
    "one pair": torch.tensor([2]),
    "no expert": torch.full((40,), -1),
    "all on one": torch.full((300,), 4),
    "few": skewed(100, 5),
    "chunks": skewed(700, 5),
    "many slots": skewed(400, 300),
}


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_alignment(name, few, monkeypatch):
    monkeypatch.setattr(module, "FEW_PAIRS", 2048 if few else 0)
    slots = CASES[name].to(DEVICE)
    num_slots, tokens = max(5, int(slots.max()) + 1), 16
    found = module.align(slots[:, None], None, num_slots, tokens)
    order, tiles = expected(slots.cpu(), num_slots, tokens)
    assert torch.equal(found.sorted_pairs.cpu(), order)
    rows = found.tiles.cpu()
    assert rows[: len(tiles)].tolist() == tiles
    assert (rows[len(tiles) :, 0] == -1).all()


def test_the_bound_is_reached_and_not_passed():
    for counts in ([1, 1, 1], [17, 1, 0], [16, 16, 16], [0, 0, 49]):
        tiles = sum(-(-count // 16) for count in counts)
        assert tiles <= module.most_tiles(sum(counts), 3, 16)
    assert module.most_tiles(3, 3, 16) == 3
    assert module.most_tiles(17 + 17 + 17, 3, 16) == 6
