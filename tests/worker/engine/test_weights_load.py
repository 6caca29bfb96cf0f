"""Loading is strict, reports bytes, fills views, and holds one tensor at a time."""

import weakref
from collections.abc import Mapping

import pytest
import torch

from moebius_worker.checkpoint.checkpoint import CheckpointError
from moebius_worker.engine.weights import TensorInfo, load_weights


class Reader:
    """Tensors in memory, as if in a file; every read makes a new one and asks for the last to be gone."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.stored = tensors
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), "F32", "file-1", tensor.numel() * 4)
            for name, tensor in tensors.items()
        }
        self.last: weakref.ref[torch.Tensor] | None = None
        self.reads: list[str] = []

    def read(self, name: str) -> torch.Tensor:
        assert self.last is None or self.last() is None, "the last tensor is still held"
        tensor = self.stored[name].clone()
        self.last = weakref.ref(tensor)
        self.reads.append(name)
        return tensor


def nothing(name: str) -> bool:
    return False


def test_views_into_fused_parameters_are_filled_and_converted() -> None:
    parameter = torch.nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
    reader = Reader({"q": torch.randn(2, 3), "k": torch.randn(3, 3), "buffer": torch.randn(7)})
    calls: list[tuple[str, int, int]] = []
    load_weights(
        reader,
        {"q": parameter[:2], "k": parameter[2:]},
        lambda name: name == "buffer",
        lambda *call: calls.append(call),
    )
    expected = torch.cat([reader.stored["q"], reader.stored["k"]]).bfloat16()
    assert torch.equal(parameter.detach(), expected)
    assert calls == [("q", 24, 60), ("k", 60, 60)]
    assert reader.reads == ["q", "k"]


@pytest.mark.parametrize(
    ("destinations", "message"),
    [
        ({"a": (2, 3)}, r"1 tensors that the model has no place for: b \[4\] in file-1\."),
        (
            {"a": (2, 3), "b": (4,), "c": (1, 2)},
            r"1 tensors that the model needs are not in file-1: c \[1, 2\]\.",
        ),
        ({"a": (3, 2), "b": (4,)}, r"a is \[2, 3\] in file-1, the model's \[3, 2\]"),
        ({"a": (2, 3), "b": (4, 1)}, r"b is \[4\] in file-1, the model's \[4, 1\]"),
    ],
)
def test_whatever_does_not_fit_is_named_before_anything_is_read(
    destinations: dict[str, tuple[int, ...]], message: str
) -> None:
    reader = Reader({"a": torch.ones(2, 3), "b": torch.ones(4)})
    with pytest.raises(CheckpointError, match=message):
        load_weights(reader, {name: torch.zeros(shape) for name, shape in destinations.items()}, nothing)
    assert reader.reads == []


def test_all_kinds_of_misfit_are_told_at_once_and_long_lists_are_cut() -> None:
    reader = Reader({f"extra.{n}": torch.ones(1) for n in range(9)} | {"shape": torch.ones(2)})
    with pytest.raises(CheckpointError) as error:
        load_weights(reader, {"missing": torch.zeros(1), "shape": torch.zeros(3)}, nothing)
    text = str(error.value)
    assert "9 tensors that the model has no place for" in text
    assert "and 4 more" in text
    assert "missing [1]" in text
    assert "shape is [2]" in text


def test_an_ignored_tensor_that_is_wanted_is_missing() -> None:
    with pytest.raises(CheckpointError, match=r"needs are not in file-1: a \[1\]"):
        load_weights(Reader({"a": torch.ones(1)}), {"a": torch.zeros(1)}, lambda name: True)


def test_whole_numbers_are_no_weights() -> None:
    reader = Reader({"a": torch.ones(2, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match="a in file-1 holds F32, no floating-point numbers"):
        load_weights(reader, {"a": torch.zeros(2)}, nothing)
