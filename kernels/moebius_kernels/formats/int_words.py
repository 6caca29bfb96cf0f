"""Integer codes of 4 bits with columns in the order in which GPU kernels expand them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from moebius_kernels.formats.codes import spread, unpack_nibbles
from moebius_kernels.formats.format import Component
from moebius_kernels.formats.words import CODED, SCALED, from_words, to_words, whole_rows

# In a half of a word four codes lie side by side: a shift by 4 p and one mask bring those of a pair to where
# bf16 numbers from 128 on have their units.
MOVES = tuple(((4 * pair, 15),) for pair in range(4))
# The group of matrices with one factor a row: more columns than any has.
ROW = 1 << 20


@dataclass(frozen=True, slots=True)
class IntWords:
    """Value: (code - 8) * factor, plus the offset if `centred`, of groups of `group` columns, a power of two
    from 32 on.

    `data` uint8, codes in words (`words.py`). `scale` bf16: factors, or factor and offset alternate. Rows are
    for whole columns of 32 and, of factors, 256 or a group if that is more: zeros follow the last, so that
    kernels can copy rows by 16 bytes and factors by 4 or more.

    Groups of more than 32 columns have an offset, be it 0: so no two of them share a word, of which each step
    of a product would have to choose a half.
    """

    group: int
    centred: bool

    def __post_init__(self) -> None:
        assert self.centred or self.group == CODED

    @property
    def name(self) -> str:
        group = "" if self.group == ROW else f" g{self.group}"
        return f"int4{group}{' centred' if self.centred else ''} words"

    @property
    def components(self) -> Mapping[str, Component]:
        scaled = max(SCALED, self.group)
        items = scaled // self.group * (2 if self.centred else 1)
        return {
            "data": Component(torch.uint8, columns_per=CODED, items=CODED // 2),
            "scale": Component(torch.bfloat16, columns_per=scaled, items=items),
        }

    @property
    def column_block(self) -> int:
        return 2

    def dequantize(self, parts: Mapping[str, torch.Tensor], columns: int) -> torch.Tensor:
        codes = unpack_nibbles(from_words(parts["data"], MOVES))[..., :columns]
        groups = -(-columns // self.group)
        scale = parts["scale"].float()
        if not self.centred:
            return (codes.float() - 8) * self._spread(scale[..., :groups], columns)
        pairs = scale.unflatten(-1, (-1, 2))[..., :groups, :]
        factor, offset = (self._spread(pairs[..., i], columns) for i in range(2))
        return (codes.float() - 8) * factor + offset

    def _spread(self, scale: torch.Tensor, columns: int) -> torch.Tensor:
        return spread(scale, min(self.group, columns), columns)

    def parts_of(
        self, data: torch.Tensor, factor: torch.Tensor, offset: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Of codes [..., C/2], the low nibble the even column, and what all groups have; no offset is 0."""
        if self.centred:
            offset = torch.zeros_like(factor) if offset is None else offset
            factor = torch.stack((factor, offset), -1).flatten(-2)
        per_row = self.components["scale"].items
        return {"data": to_words(data, MOVES), "scale": whole_rows(factor.bfloat16(), per_row)}
