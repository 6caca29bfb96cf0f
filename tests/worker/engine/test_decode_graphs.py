"""How decode steps are captured, as far as it goes without a GPU."""

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebius_kernels.formats.dense import dense
from moebius_kernels.operations import REFERENCE
from moebius_worker.engine.decode_graphs import DecodeGraphs, _without_padding, graph_sizes
from moebius_worker.engine.models.context import StepContext

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


class FakeCuda:
    """What `torch.cuda` is asked for around captures; `graphs`: the pool and the end of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.graphs: list[tuple[Any, str]] = []
        self.capturing = False
        for name in ("empty_cache", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda name=name: self._called(name))
        monkeypatch.setattr(torch.cuda, "Stream", object)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)

    def _called(self, name: str) -> None:
        assert not self.capturing
        self.calls[name] += 1

    def capture_begin(self, pool: Any) -> None:
        self.capturing = True
        self.graphs.append((pool, ""))

    def capture_end(self) -> None:
        assert self.capturing
        self.capturing = False
        pool, _ = self.graphs[-1]
        self.graphs[-1] = pool, "ended"
        if self.calls["broken"]:
            raise RuntimeError("the capture was invalidated")


class FakeModel:
    """Its logits are the number of rows; `steps`: that of each step, and whether it was captured."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.layers, self.steps = cuda, [], []

    def bind(self, operations: Any) -> None:
        pass

    def forward(self, context: StepContext, progress: Any) -> torch.Tensor:
        self.steps.append((len(context.token_ids), self.cuda.capturing))
        if self.cuda.capturing and len(context.token_ids) == 666:
            self.cuda.calls["broken"] += 1
            raise ValueError("this cannot be captured")
        return context.token_ids

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tensor(len(hidden))


def _graphs(monkeypatch: pytest.MonkeyPatch) -> tuple[DecodeGraphs, FakeModel, FakeCuda]:
    cuda = FakeCuda(monkeypatch)
    model = FakeModel(cuda)

    def context(slices: Any, *, pad_to: int, drawn: Any = None) -> StepContext:
        rows = torch.zeros(pad_to, dtype=torch.int64)
        return StepContext(rows, rows, rows, {}, ())

    inputs: Any = SimpleNamespace(context=context, absent=torch.zeros(700, dtype=torch.bool))
    return DecodeGraphs(model, inputs, REFERENCE), model, cuda  # type: ignore[arg-type]


def test_each_size_is_warmed_up_and_captured_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, model, cuda = _graphs(monkeypatch)
    told: list[tuple[str, int, int]] = []
    graphs.capture([1, 2, 16], lambda *words: told.append(words))
    assert model.steps == [(16, False), (16, True), (2, False), (2, True), (1, False), (1, True)]
    assert told == [("capturing CUDA graphs", done, 3) for done in range(3)]
    assert [end for _, end in cuda.graphs] == ["ended"] * 3
    found = {size: int(logits) for size, (_, logits) in graphs._graphs.items()}
    assert found == {16: 16, 2: 2, 1: 1}
    assert graphs.fits([])


def test_captures_share_their_memory_and_free_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, _, cuda = _graphs(monkeypatch)
    graphs.capture(range(1, 9), lambda *words: None)
    assert len({id(pool) for pool, _ in cuda.graphs}) == 1
    assert cuda.calls == {"empty_cache": 1, "synchronize": 8}


def test_what_cannot_be_captured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, _, cuda = _graphs(monkeypatch)
    with pytest.raises(ValueError, match="this cannot be captured"):
        graphs.capture([666], lambda *words: None)
    assert not cuda.capturing
