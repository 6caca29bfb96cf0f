"""What a captured step does with rows that do not exist, as far as it goes without a GPU."""

import pytest
import torch

from moebius_kernels.formats.dense import dense
from moebius_kernels.operations import REFERENCE
from moebius_worker.engine.decode_graphs import _without_padding, graph_sizes

ABSENT = torch.tensor([False, False, True, True])


def test_rows_that_do_not_exist_are_nan_from_the_start() -> None:
    numbers = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    operations = _without_padding(REFERENCE, ABSENT)
    for ids in ([4, 2, 0, 0], [7, 7, 7], [9]):
        rows = operations.embedding(torch.tensor(ids), dense(numbers), torch.float32)
        exist = ~ABSENT[: len(ids)]
        assert torch.equal(rows[exist], numbers[ids][exist])
        assert rows[~exist].isnan().all()
    assert numbers.isfinite().all()


@pytest.mark.parametrize("max_running", [1, 3, 8, 9, 32, 33, 128, 300])
def test_the_largest_graph_is_for_all_that_run(max_running: int) -> None:
    sizes = graph_sizes(max_running)
    assert sizes[-1] == max_running
    assert list(sizes) == sorted(set(sizes))
    assert sizes[: min(8, max_running)] == tuple(range(1, min(8, max_running) + 1))
