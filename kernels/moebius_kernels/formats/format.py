"""What a stored form of a matrix is made of, and matrices in such a form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch


class FormatError(ValueError):
    """A matrix of this shape, or a part of one that begins or ends here, cannot be stored in this form."""


@dataclass(frozen=True, slots=True)
class Component:
    """One of the tensors that a matrix [R, C] is stored in.

    It has a row for each `rows_per` rows of the matrix, and `items` elements for each `columns_per` columns
    (None: for all columns together). Packed nibbles have columns_per = 2, items = 1.
    """

    dtype: torch.dtype
    rows_per: int = 1
    columns_per: int | None = 1
    items: int = 1

    def rows(self, count: int) -> int:
        return -(-count // self.rows_per)

    def columns(self, count: int) -> int:
        return self.items if self.columns_per is None else -(-count // self.columns_per) * self.items


class Format(Protocol):
    """A stored form. Implementations are frozen data classes: equal forms compare equal."""

    @property
    def name(self) -> str:
        """For people and tables: "bf16", "fp8 128x128", "nvfp4", "q4_k"."""
        ...

    @property
    def components(self) -> Mapping[str, Component]: ...

    @property
    def column_block(self) -> int:
        """The number of columns must be a multiple of this; 1 if any will do."""
        ...

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        """fp32 [..., R, C] of the components [..., rows, columns]; leading dimensions are kept."""
        ...


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Matrices of a logical `shape` [..., R, C] in a stored form. Indexing and slicing give views."""

    format: Format
    shape: tuple[int, ...]
    parts: Mapping[str, torch.Tensor]

    @classmethod
    def empty(cls, format: Format, shape: tuple[int, ...], device: torch.device) -> Self:
        """Not filled. Raises FormatError for a number of columns that the form cannot store."""
        *leading, rows, columns = shape
        if columns % format.column_block:
            raise FormatError(
                f"{format.name} stores multiples of {format.column_block} columns, not {columns}"
            )
        parts = {
            name: torch.empty(
                (*leading, part.rows(rows), part.columns(columns)), dtype=part.dtype, device=device
            )
            for name, part in format.components.items()
        }
        return cls(format, shape, parts)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[..., R, C] in `dtype`."""
        return self.format.dequantize(self.parts, self.shape[-1]).to(dtype)

    def __getitem__(self, index: int) -> Self:
        """The matrix at `index` of the leading dimension."""
        return self._with(self.shape[1:], lambda name, part: part[index])

    def take(self, indices: Sequence[int]) -> Self:
        """Copies of the matrices at these indices of the leading dimension, [indices, ..., R, C]."""
        chosen = torch.tensor(indices, device=next(iter(self.parts.values())).device)

        def taken(name: str, part: torch.Tensor) -> torch.Tensor:
            # PyTorch copies float8 by index on some devices only, bytes on all.
            return part.view(torch.uint8).index_select(0, chosen).view(part.dtype)

        return self._with((len(indices), *self.shape[1:]), taken)

    def narrow_rows(self, start: int, count: int) -> Self:
        """Rows `start` to `start + count`. Raises FormatError where they share scales with others."""
        stop = start + count
        for name, spec in self.format.components.items():
            if start % spec.rows_per or (stop % spec.rows_per and stop != self.shape[-2]):
                raise FormatError(f"{self.format.name} shares {name} among {spec.rows_per} rows")

        def cut(name: str, part: torch.Tensor) -> torch.Tensor:
            spec = self.format.components[name]
            return part.narrow(-2, start // spec.rows_per, spec.rows(count))

        return self._with((*self.shape[:-2], count, self.shape[-1]), cut)

    def narrow_columns(self, start: int, count: int) -> Self:
        """Columns `start` to `start + count`. Raises FormatError where they share a block with others."""
        stop = start + count
        for name, spec in self.format.components.items():
            per = spec.columns_per
            if per is not None and (start % per or (stop % per and stop != self.shape[-1])):
                raise FormatError(f"{self.format.name} shares {name} among {per} columns")

        def cut(name: str, part: torch.Tensor) -> torch.Tensor:
            spec = self.format.components[name]
            if spec.columns_per is None:
                return part
            return part.narrow(-1, start // spec.columns_per * spec.items, spec.columns(count))

        return self._with((*self.shape[:-1], count), cut)

    def copy_(self, source: Self) -> None:
        """Takes the contents of a matrix of the same form and shape."""
        if (source.format, source.shape) != (self.format, self.shape):
            raise FormatError(
                f"{source.format.name} {list(source.shape)} does not fit "
                f"{self.format.name} {list(self.shape)}"
            )
        for name, part in self.parts.items():
            part.copy_(source.parts[name])

    def _with(self, shape: tuple[int, ...], cut: Callable[[str, torch.Tensor], torch.Tensor]) -> Self:
        return type(self)(self.format, shape, {name: cut(name, part) for name, part in self.parts.items()})
