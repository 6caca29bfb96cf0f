"""Products with weight matrices in whatever form they are stored."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.format import StoredMatrix

# Numbers of a quantised matrix that are expanded at a time: a vocabulary's worth would be gigabytes.
EXPANDED_NUMBERS = 1 << 24


def linear(x: torch.Tensor, blocks: Sequence[StoredMatrix], bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ W.T + bias` with W the rows of `blocks`, one block after another.

    x [..., C]; blocks [R_i, C] each; bias [sum of R_i]; the result is [..., sum of R_i] in x's dtype. Sums
    are in fp32; a block in another form than x's is expanded to fp32 piece by piece.
    """
    if len(blocks) == 1 and _as_x(x, blocks[0]):
        return F.linear(x, blocks[0].parts["data"], None if bias is None else bias.to(x.dtype))
    outputs = [_product(x, block) for block in blocks]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return output if bias is None else output + bias


def embedding(token_ids: torch.Tensor, table: StoredMatrix, dtype: torch.dtype) -> torch.Tensor:
    """Rows `token_ids` [T] of the table [V, C] -> [T, C] in `dtype`. No form's scales span rows here."""
    rows = {name: part.index_select(0, token_ids) for name, part in table.parts.items()}
    return table.format.dequantize(rows, table.shape[-1]).to(dtype)


def _product(x: torch.Tensor, block: StoredMatrix) -> torch.Tensor:
    if _as_x(x, block):
        return F.linear(x, block.parts["data"])
    wide = x.float()
    products = [F.linear(wide, piece.dequantize()) for piece in _pieces(block)]
    return torch.cat(products, dim=-1).to(x.dtype)


def _as_x(x: torch.Tensor, block: StoredMatrix) -> bool:
    return isinstance(block.format, Dense) and block.parts["data"].dtype == x.dtype


def _pieces(block: StoredMatrix) -> Iterator[StoredMatrix]:
    rows, columns = block.shape
    shared = max(part.rows_per for part in block.format.components.values())
    step = max(1, EXPANDED_NUMBERS // columns // shared) * shared
    for start in range(0, rows, step):
        yield block.narrow_rows(start, min(step, rows - start))
