"""Names and stacks of checkpoints come out as one tensor a projection and expert."""

import pytest
import torch

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.weights.layout import Layout, Stack, lay_out


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


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("_bias", (3, 6)),
        ("_bias", (2, 5)),
        ("_weight_scale", (4, 6)),
        ("_blocks", (1, 6, 4, 16)),
        ("", (2, 5, 5)),
        ("", (1 << 40, 0, 6)),
    ],
)
def test_a_stack_that_is_not_of_the_same_experts_is_refused(kind: str, shape: tuple[int, ...]) -> None:
    """Of two experts with gate and up, inputs first."""
    stack = Stack("experts.gate_up_proj", GATE_UP, interleaved=True, transposed=frozenset({"weight"}))
    tensors = {"a.experts.gate_up_proj": torch.ones(2, 5, 6)} if kind else {}
    tensors[f"a.experts.gate_up_proj{kind}"] = torch.ones(shape)
    message = r"gate_up_proj\w* is \[.*\] in file-1, which is not gate_proj and up_proj of \d+ experts"
    for names in (list(tensors), list(reversed(tensors))):
        reader = Reader(**{name.replace(".", "__"): tensors[name] for name in names})
        with pytest.raises(CheckpointError, match=message):
            lay_out(reader, Layout(stacks=(stack,)))


def test_factors_without_their_stack_are_not_lost() -> None:
    reader = Reader(a__experts__gate_up_proj_weight_scale_2=torch.ones(2))
    layout = Layout(stacks=(Stack("experts.gate_up_proj", GATE_UP),))
    assert lay_out(reader, layout).tensors == reader.tensors


def test_two_tensors_that_come_to_have_one_name_are_refused() -> None:
    reader = Reader(model__language_model__a=torch.ones(1), model__a=torch.ones(1))
    layout = Layout(renames=((r"^model\.language_model\.", "model."),))
    with pytest.raises(
        CheckpointError, match=r"model\.a in file-1 is the same as model\.language_model\.a in"
    ):
        lay_out(reader, layout)
