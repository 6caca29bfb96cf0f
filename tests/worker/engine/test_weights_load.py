"""Loading is strict, reports bytes, keeps each matrix in its form, and holds one tensor at a time."""

import weakref
from collections.abc import Callable, Mapping

import pytest
import torch

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.linear import linear
from moebius_worker.checkpoint.checkpoint import CheckpointError
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.models.parameters import Matrix, Place, Rank, Shard, Slots, Vector
from moebius_worker.engine.weights.load import Loading, plan_loading
from moebius_worker.engine.weights.scheme import StoredForm

CPU = Place(torch.device("cpu"), torch.float32)
PER_ROW = Fp8(1, None)


class Reader:
    """Tensors in memory, as if in a file; every read makes a new one and asks for the last to be gone."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.stored = tensors
        self.tensors = {
            name: TensorInfo(
                tuple(tensor.shape),
                {torch.float8_e4m3fn: "F8_E4M3", torch.int32: "I32"}.get(tensor.dtype, "F32"),
                "file-1",
                tensor.nbytes,
            )
            for name, tensor in tensors.items()
        }
        self.last: list[weakref.ref[torch.Tensor]] = []
        self.reads: list[str] = []

    def read(self, name: str) -> torch.Tensor:
        module = name.rpartition(".")[0]
        if self.reads and self.reads[-1].rpartition(".")[0] != module:
            assert all(last() is None for last in self.last), "the last tensors are still held"
            self.last.clear()
        tensor = self.stored[name].clone()
        self.last.append(weakref.ref(tensor))
        self.reads.append(name)
        return tensor


class Scheme:
    """fp8 with a scale a row where there is a scale; everything else is fp32."""

    name = "a test's"

    def form(self, weight: str, tensors: Mapping[str, TensorInfo]) -> StoredForm:
        scale = f"{weight}_scale"
        if scale not in tensors:
            return StoredForm(
                Dense(torch.float32), tensors[weight].shape, (weight,), lambda read: {"data": read(weight)}
            )
        return StoredForm(
            PER_ROW,
            tensors[weight].shape,
            (weight, scale),
            lambda read: {"data": read(weight), "scale": read(scale)},
        )


def quantised(name: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    return {
        f"{name}.weight": torch.randn(rows, columns).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": torch.rand(rows, 1) + 0.5,
    }


def value(stored: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    return stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]


def plan(
    reader: Reader,
    slots: Slots,
    ignored: Callable[[str], bool] = lambda name: False,
    *,
    expand: bool = False,
) -> Loading:
    return plan_loading(reader, Scheme(), slots, ignored, dtype=torch.float32, expand=expand)


def filled(loading: Loading, rank: Rank = Rank()) -> Loading:  # noqa: B008 - a frozen default
    loading.allocate(CPU, rank)
    loading.fill(rank)
    return loading


def test_parts_of_a_fused_parameter_are_filled_in_the_order_of_the_file() -> None:
    bias, matrix = Vector(5, parts={"q": 2, "k": 3}), Matrix({"q": 2, "k": 3}, 3)
    stored = {
        "q.weight": torch.randn(2, 3),
        "k.weight": torch.randn(3, 3),
        "k.bias": torch.randn(3),
        "buffer": torch.randn(7),
        "q.bias": torch.randn(2),
    }
    reader, calls = Reader(stored), []
    slots = {f"{part}.weight": matrix.slot(part) for part in ("q", "k")}
    slots |= {f"{part}.bias": bias.slot(part) for part in ("q", "k")}
    loading = plan(reader, slots, lambda name: name == "buffer")
    assert reader.reads == []
    loading.allocate(CPU)
    assert loading.nbytes == 4 * (15 + 5)
    loading.fill(progress=lambda *call: calls.append(call))
    assert torch.equal(matrix.data, torch.cat([stored["q.weight"], stored["k.weight"]]))
    assert torch.equal(bias.data, torch.cat([stored["q.bias"], stored["k.bias"]]))
    assert reader.reads == [name for name in stored if name != "buffer"]
    assert calls == [("q.weight", 24, 80), ("k.weight", 60, 80), ("k.bias", 72, 80), ("q.bias", 80, 80)]


def test_sizes_are_known_without_memory() -> None:
    matrix = Matrix({"": 1 << 20}, 1 << 20)
    loading = Loading(Reader({}), [], {matrix: {"": Dense(torch.bfloat16)}}, [])
    loading.allocate(Place(torch.device("meta"), torch.bfloat16))
    assert loading.nbytes == 2 << 40


def test_quantised_neighbours_share_a_block_and_others_stand_alone() -> None:
    stored = quantised("q", 4, 8) | quantised("k", 2, 8) | {"v.weight": torch.randn(2, 8)}
    matrix = Matrix({"q": 4, "k": 2, "v": 2}, 8)
    filled(plan(Reader(stored), {f"{part}.weight": matrix.slot(part) for part in "qkv"}))
    assert [(block.format, block.shape) for block in matrix.blocks] == [
        (PER_ROW, (6, 8)),
        (Dense(torch.float32), (2, 8)),
    ]
    whole = torch.cat([value(stored, "q"), value(stored, "k"), stored["v.weight"]])
    x = torch.randn(3, 8)
    assert torch.allclose(linear(x, matrix.blocks), x @ whole.T, atol=1e-5)


def test_expanded_weights_are_plain_and_equal() -> None:
    stored = quantised("q", 4, 8) | quantised("k", 2, 8)
    matrix = Matrix({"q": 4, "k": 2}, 8)
    filled(plan(Reader(stored), {f"{part}.weight": matrix.slot(part) for part in "qk"}, expand=True))
    assert torch.equal(matrix.data, torch.cat([value(stored, "q"), value(stored, "k")]))


def test_a_matrix_that_must_be_plain_is_expanded() -> None:
    stored, matrix = quantised("q", 4, 8), Matrix({"q": 4}, 8, plain=True)
    filled(plan(Reader(stored), {"q.weight": matrix.slot("q")}))
    assert torch.equal(matrix.data, value(stored, "q"))


@pytest.mark.parametrize("expand", [False, True])
def test_a_table_of_the_host_stays_as_it_is_stored(expand: bool) -> None:
    stored, table = quantised("q", 4, 8), Matrix({"q": 4}, 8, host=True)
    loading = filled(plan(Reader(stored), {"q.weight": table.slot("q")}, expand=expand))
    [block] = table.blocks
    assert block.format == PER_ROW
    assert torch.equal(block.dequantize(), value(stored, "q"))
    assert loading.host_nbytes == loading.nbytes == block.nbytes


def test_experts_in_unlike_forms_are_all_expanded() -> None:
    stored = quantised("0.up", 4, 8) | {"1.up.weight": torch.randn(4, 8)}
    matrix = Matrix({"up": 4}, 8, experts=2)
    filled(plan(Reader(stored), {f"{e}.up.weight": matrix.slot("up", e) for e in (0, 1)}))
    assert torch.equal(matrix.data, torch.stack([value(stored, "0.up"), stored["1.up.weight"]]))


def test_what_is_optional_has_a_default() -> None:
    optional = Vector(3, default=1.0)
    filled(plan(Reader({}), {"scale": optional.slot()}))
    assert optional.data.tolist() == [1.0, 1.0, 1.0]


def test_integers_are_read_or_have_a_default() -> None:
    read, optional = (Vector(2, dtype=torch.int64, default=torch.tensor([1 << 62, -3])) for _ in range(2))
    stored = {"read": torch.tensor([7, 8], dtype=torch.int32)}
    filled(plan(Reader(stored), {"read": read.slot(), "optional": optional.slot()}))
    assert (read.data.tolist(), optional.data.tolist()) == ([7, 8], [1 << 62, -3])
    with pytest.raises(CheckpointError, match="read in file-1 holds F32, no integers"):
        filled(plan(Reader({"read": torch.ones(2)}), {"read": read.slot()}))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"a": (2, 3)}, r"1 tensors that the model has no place for: b \[4\] in file-1\."),
        (
            {"a": (2, 3), "b": (4,), "c": (2, 2)},
            r"1 tensors that the model needs are not in file-1: c \[2, 2\]\.",
        ),
        ({"a": (3, 2), "b": (4,)}, r"a is \[2, 3\] in file-1, the model's \[3, 2\]"),
    ],
)
def test_whatever_does_not_fit_is_named_before_anything_is_read(
    wanted: dict[str, tuple[int, ...]], message: str
) -> None:
    reader = Reader({"a": torch.ones(2, 3), "b": torch.ones(4)})
    with pytest.raises(CheckpointError, match=message):
        plan(reader, {name: Vector(*shape).slot() for name, shape in wanted.items()})
    assert reader.reads == []


def test_all_kinds_of_misfit_are_told_at_once_and_long_lists_are_cut() -> None:
    reader = Reader({f"extra.{n}": torch.ones(1) for n in range(9)} | {"shape": torch.ones(2)})
    with pytest.raises(CheckpointError) as error:
        plan(reader, {"missing": Vector(2).slot(), "shape": Vector(3).slot()})
    text = str(error.value)
    assert "9 tensors that the model has no place for" in text
    assert "and 4 more" in text
    assert "missing [2]" in text
    assert "shape is [2]" in text


def test_an_ignored_tensor_that_is_wanted_is_missing() -> None:
    with pytest.raises(CheckpointError, match=r"needs are not in file-1: a \[1\]"):
        plan(Reader({"a": torch.ones(1)}), {"a": Vector(1).slot()}, lambda name: True)


def test_whole_numbers_are_no_weights() -> None:
    loading = plan(Reader({"a": torch.ones(2, dtype=torch.int32)}), {"a": Vector(2).slot()})
    with pytest.raises(CheckpointError, match="a in file-1 holds I32, no floating-point numbers"):
        filled(loading)


def sharded(
    shard: Shard, world: int
) -> tuple[dict[str, torch.Tensor], list[StoredMatrix], list[torch.Tensor]]:
    """What is stored, and each rank's block and bias."""
    stored = {}
    for expert in range(4):
        stored |= quantised(f"{expert}.up", 8, 16) | {f"{expert}.up.bias": torch.randn(8)}
    blocks, biases = [], []
    for rank in range(world):
        matrix = Matrix({"up": 8}, 16, experts=4, shard=shard)
        bias = Vector(8, parts={"up": 8}, experts=4, shard=shard)
        slots = {f"{e}.up.weight": matrix.slot("up", e) for e in range(4)}
        slots |= {f"{e}.up.bias": bias.slot("up", e) for e in range(4)}
        filled(plan(Reader(stored), slots), Rank(rank, world))
        blocks.append(matrix.blocks[0])
        biases.append(bias.data)
    return stored, blocks, biases


@pytest.mark.parametrize(("shard", "dim"), [(Shard.COLUMN, 1), (Shard.ROW, 2), (Shard.EXPERT, 0)])
def test_the_shares_of_all_ranks_are_the_whole(shard: Shard, dim: int) -> None:
    stored, blocks, biases = sharded(shard, 2)
    whole = torch.stack([value(stored, f"{expert}.up") for expert in range(4)])
    assert torch.equal(torch.cat([block.dequantize() for block in blocks], dim=dim), whole)
    assert {block.shape for block in blocks} == {
        tuple(n // 2 if i == dim else n for i, n in enumerate(whole.shape))
    }
    bias = torch.stack([stored[f"{expert}.up.bias"] for expert in range(4)])
    if shard is Shard.ROW:  # a bias is added once, to the sum
        assert all(torch.equal(own, bias) for own in biases)
    else:
        assert torch.equal(torch.cat(biases, dim=dim), bias)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(CheckpointError, match="16 cannot be divided among 3 ranks"):
        sharded(Shard.ROW, 3)


def test_without_shards_each_rank_has_all() -> None:
    stored, blocks, _ = sharded(Shard.NONE, 2)
    whole = torch.stack([value(stored, f"{expert}.up") for expert in range(4)])
    for block in blocks:
        assert torch.equal(block.dequantize(), whole)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("expand", [False, True])
def test_factors_that_are_not_finite_are_refused(bad: float, expand: bool) -> None:
    stored = quantised("a", 4, 8)
    stored["a.weight_scale"][2] = bad
    matrix = Matrix({"a": 4}, 8)
    loading = plan(Reader(stored), {"a.weight": matrix.slot("a")}, expand=expand)
    with pytest.raises(
        CheckpointError, match=r"a\.weight in file-1 has factors \(scale\) that are not finite"
    ):
        filled(loading)
