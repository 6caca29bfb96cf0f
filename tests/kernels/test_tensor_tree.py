"""What is done to the tensors of a call's arguments."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from moebius_kernels.tensor_tree import copy_tensors, map_tensors, tensors_of


class _Pair(NamedTuple):
    left: torch.Tensor
    name: str


@dataclass(frozen=True)
class _Record:
    pairs: tuple[_Pair, ...]
    more: list[torch.Tensor]


def test_tensors_are_found_and_changed_in_all_that_holds_them() -> None:
    numbers = [torch.full((2,), float(at)) for at in range(4)]
    value = {
        "record": _Record((_Pair(numbers[0], "a"), _Pair(numbers[1], "b")), [numbers[2]]),
        "x": numbers[3],
    }
    assert [int(tensor[0]) for tensor in tensors_of(value)] == [0, 1, 2, 3]
    changed = map_tensors(value, lambda tensor: tensor + 10)
    assert [int(tensor[0]) for tensor in tensors_of(changed)] == [10, 11, 12, 13]
    assert isinstance(changed["record"].pairs[1], _Pair)
    assert changed["record"].pairs[1].name == "b"
    copies = tensors_of(copy_tensors(value))
    assert all(torch.equal(copy, own) and copy is not own for copy, own in zip(copies, numbers, strict=True))
