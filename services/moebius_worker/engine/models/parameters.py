"""Parameters of a model: declared with their names, sizes and sharding, then given memory, then filled.

A family declares what it has and nothing about how that is stored: the loader finds each matrix's form in the
checkpoint and allocates it in that form.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch

from moebius_kernels.formats.format import Format, FormatError, StoredMatrix
from moebius_kernels.formats.pack import pack


class Shard(StrEnum):
    """How the ranks of a parallel model divide a parameter among them."""

    NONE = "none"
    # Outputs: rows of a matrix, elements of its bias.
    COLUMN = "column"
    # Inputs: columns of a matrix.
    ROW = "row"
    # Whole experts.
    EXPERT = "expert"


@dataclass(frozen=True, slots=True)
class Place:
    """Where parameters live and in which dtype the model computes."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `world` processes that have a model together."""

    index: int = 0
    world: int = 1

    def share(self, size: int) -> tuple[int, int]:
        """Start and size of this rank's part. Raises FormatError if `size` cannot be divided."""
        if size % self.world:
            raise FormatError(f"{size} cannot be divided among {self.world} ranks")
        return self.index * (size // self.world), size // self.world


WHOLE = Rank()


@dataclass(frozen=True, slots=True)
class Slot:
    """What one tensor of a checkpoint, or one matrix in whatever tensors, fills."""

    owner: "Vector | Matrix"
    # The whole parameter's, as the checkpoint has it.
    shape: tuple[int, ...]
    part: str = ""
    expert: int = 0


# Slots under the names that Hugging Face checkpoints have.
Slots = dict[str, Slot]


class Vector:
    """A plain tensor of any rank: norms, biases, sinks, convolutions. Parts lie one after another in dim 0.

    `dtype`: None for the model's own. `experts`: as many of it, stacked. `default`: what fills it, or its
    contents, if the checkpoint has no such tensor; None if it must.
    """

    def __init__(
        self,
        *shape: int,
        parts: Mapping[str, int] | None = None,
        experts: int | None = None,
        dtype: torch.dtype | None = None,
        shard: Shard = Shard.NONE,
        default: float | torch.Tensor | None = None,
    ) -> None:
        self.parts: Final = dict(parts or {"": shape[0] if shape else 1})
        self.shape: Final = (sum(self.parts.values()), *shape[1:]) if shape else ()
        self.experts: Final = experts
        self.dtype: Final = dtype
        self.shard: Final = shard
        self.default: Final = default
        self.data = torch.empty(0)
        self._rows = self.parts

    def slot(self, part: str = "", expert: int = 0) -> Slot:
        return Slot(self, (self.parts[part], *self.shape[1:]) if self.shape else (), part, expert)

    def allocate(self, place: Place, rank: Rank = WHOLE) -> None:
        leading = _own_experts(self.experts, self.shard, rank)
        self._rows = _own_rows(self.parts, self.shard, rank)
        shape = (sum(self._rows.values()), *self.shape[1:]) if self.shape else ()
        self.data = torch.empty((*leading, *shape), dtype=self.dtype or place.dtype, device=place.device)

    def destination(self, part: str, expert: int) -> torch.Tensor:
        """The part's view of the data; `expert` counts this rank's."""
        data = self.data if self.experts is None else self.data[expert]
        if not self.shape:
            return data
        start = 0
        for name, count in self._rows.items():
            if name == part:
                return data.narrow(0, start, count)
            start += count
        raise KeyError(part)

    def own(self, whole: torch.Tensor, rank: Rank = WHOLE) -> torch.Tensor:
        """This rank's share of a part."""
        if self.shard is not Shard.COLUMN or not self.shape:
            return whole
        return whole.narrow(0, *rank.share(whole.shape[0]))

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.data


class Matrix:
    """Weight matrices with the same inputs, their rows one after another, read by one operation.

    `parts`: rows of each. `experts`: as many of it, stacked. `plain`: always expanded to the model's dtype,
    for matrices that are not multiplied with as they are. `host`: always as it is stored, and in the host's
    memory, for tables too large for a device of which a step reads few rows.
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        columns: int,
        *,
        experts: int | None = None,
        shard: Shard = Shard.NONE,
        plain: bool = False,
        host: bool = False,
    ) -> None:
        self.parts: Final = dict(parts)
        self.columns: Final = columns
        self.experts: Final = experts
        self.shard: Final = shard
        self.plain: Final = plain
        self.host: Final = host
        # Neighbours in the same form are one block.
        self.blocks: tuple[StoredMatrix, ...] = ()
        self._views: dict[str, StoredMatrix] = {}

    @property
    def data(self) -> torch.Tensor:
        """[R, C] (or [E, R, C]) of a matrix that is `plain` and hence one block."""
        [block] = self.blocks
        return block.parts["data"]

    def slot(self, part: str, expert: int = 0) -> Slot:
        return Slot(self, (self.parts[part], self.columns), part, expert)

    def allocate(self, forms: Mapping[str, Format], place: Place, rank: Rank = WHOLE) -> None:
        """Gives each part memory in its form. Raises FormatError for sizes that a form cannot store."""
        leading = _own_experts(self.experts, self.shard, rank)
        rows = _own_rows(self.parts, self.shard, rank)
        columns = rank.share(self.columns)[1] if self.shard is Shard.ROW else self.columns
        device = torch.device("cpu") if self.host and place.device.type != "meta" else place.device
        blocks: list[StoredMatrix] = []
        for form, names in _runs(rows, forms):
            shape = (*leading, sum(rows[name] for name in names), columns)
            block = StoredMatrix.empty(form, shape, device)
            start = 0
            for name in names:
                self._views[name] = block.narrow_rows(start, rows[name])
                start += rows[name]
            blocks.append(block)
        self.blocks = tuple(blocks)

    def destination(self, part: str, expert: int) -> StoredMatrix:
        """The part's view of the blocks; `expert` counts this rank's."""
        view = self._views[part]
        return view if self.experts is None else view[expert]

    def own(self, whole: StoredMatrix, rank: Rank = WHOLE) -> StoredMatrix:
        """This rank's share of a part. Raises FormatError where a form cannot be cut there."""
        match self.shard:
            case Shard.COLUMN:
                return whole.narrow_rows(*rank.share(whole.shape[-2]))
            case Shard.ROW:
                return whole.narrow_columns(*rank.share(whole.shape[-1]))
            case _:
                return whole

    def pack(self) -> None:
        """Puts what has been filled into the forms that a GPU's kernels read; it cannot be filled again."""
        if not self.host:
            self._views = {}
            self.blocks = tuple(pack(block) for block in self.blocks)

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        for block in self.blocks:
            yield from block.parts.values()


def own_expert(slot: Slot, rank: Rank = WHOLE) -> int | None:
    """The number that the slot's expert has among this rank's; None if it is another's."""
    if slot.owner.experts is None or slot.owner.shard is not Shard.EXPERT:
        return slot.expert
    first, count = rank.share(slot.owner.experts)
    return slot.expert - first if first <= slot.expert < first + count else None


def _own_experts(experts: int | None, shard: Shard, rank: Rank) -> tuple[int, ...]:
    if experts is None:
        return ()
    return (rank.share(experts)[1] if shard is Shard.EXPERT else experts,)


def _own_rows(parts: Mapping[str, int], shard: Shard, rank: Rank) -> dict[str, int]:
    if shard is not Shard.COLUMN:
        return dict(parts)
    return {name: rank.share(count)[1] for name, count in parts.items()}


def _runs(parts: Mapping[str, int], forms: Mapping[str, Format]) -> list[tuple[Format, list[str]]]:
    """Neighbouring parts in the same form, as long as each begins where no scale spans the border."""
    runs: list[tuple[Format, list[str]]] = []
    rows = 0
    for name, count in parts.items():
        form = forms[name]
        shared = max(component.rows_per for component in form.components.values())
        if runs and runs[-1][0] == form and rows % shared == 0:
            runs[-1][1].append(name)
            rows += count
        else:
            runs.append((form, [name]))
            rows = count
    return runs
