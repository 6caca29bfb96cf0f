"""Names and stacks of checkpoints come out as one tensor a projection and expert."""

import pytest
import torch

from moebius_worker.engine.weights.layout import Layout, Stack, lay_out
from moebius_worker.engine.weights.reader import TensorInfo


class Reader:
    def __init__(self, **tensors: torch.Tensor) -> None:
        self.stored = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        self.tensors = {
            name: TensorInfo(tuple(tensor.shape), "F32", "file-1", tensor.nbytes)
            for name, tensor in self.stored.items()
        }

    def read(self, name: str) -> torch.Tensor:
        return self.stored[name]


GATE_UP = ("gate_proj", "up_proj")


def test_a_stack_is_divided_among_experts_and_projections() -> None:
    stacked = torch.randn(3, 8, 5)
    reader = Reader(layer__experts__gate_up_proj=stacked)
    laid_out = lay_out(reader, Layout(stacks=(Stack("experts.gate_up_proj", GATE_UP),)))
    names = [f"layer.experts.{expert}.{part}.weight" for expert in range(3) for part in GATE_UP]
    assert list(laid_out.tensors) == names
    for index, name in enumerate(names):
        expert, part = divmod(index, 2)
        expected = stacked[expert, part * 4 : part * 4 + 4]
        assert torch.equal(laid_out.read(name), expected)
        assert laid_out.tensors[name] == TensorInfo((4, 5), "F32", "file-1", stacked.nbytes // 6)


def test_interleaved_and_transposed_stacks_with_all_that_belongs_to_them() -> None:
    """gpt-oss: matrices inputs first, gate and up in turns; blocks, scales and biases are outputs first."""
    stack = Stack("experts.gate_up_proj", GATE_UP, interleaved=True, transposed=frozenset({"weight"}))
    tensors = {
        "": torch.randn(2, 5, 6),
        "_bias": torch.randn(2, 6),
        "_blocks": torch.randn(2, 6, 4, 16),
        "_scales": torch.randn(2, 6, 4),
        "_weight_scale_2": torch.tensor(3.0),
    }
    reader = Reader(**{f"experts__gate_up_proj{kind}": tensor for kind, tensor in tensors.items()})
    reader = Reader(**{f"a__{name}": tensor for name, tensor in reader.stored.items()})
    laid_out = lay_out(reader, Layout(stacks=(stack,)))
    for expert in range(2):
        for number, part in enumerate(GATE_UP):
            read = {
                kind: laid_out.read(f"a.experts.{expert}.{part}.{kind}")
                for kind in ("weight", "bias", "weight_blocks", "weight_scales", "weight_scale_2")
            }
            assert torch.equal(read["weight"], tensors[""][expert].T[number::2])
            assert torch.equal(read["bias"], tensors["_bias"][expert, number::2])
            assert torch.equal(read["weight_blocks"], tensors["_blocks"][expert, number::2])
            assert torch.equal(read["weight_scales"], tensors["_scales"][expert, number::2])
            assert read["weight_scale_2"] == 3.0
    assert len(laid_out.tensors) == 2 * 2 * 5


@pytest.mark.parametrize("reverse", [False, True])
def test_names_are_changed_and_left_out_whatever_the_order(reverse: bool) -> None:
    names = ["model.language_model.a", "model.visual.b", "mtp.c", "d"]
    reader = Reader(**{name.replace(".", "__"): torch.ones(1) for name in sorted(names, reverse=reverse)})
    layout = Layout(
        renames=((r"^model\.language_model\.", "model."),), ignored=(r"model\.visual\..*", r"mtp\..*")
    )
    assert set(lay_out(reader, layout).tensors) == {"model.a", "d"}


def test_without_a_layout_everything_is_as_it_was() -> None:
    reader = Reader(experts__gate_up_proj=torch.randn(2, 2, 2))
    assert lay_out(reader, Layout()).tensors == reader.tensors
