"""Dense layers by cuBLAS's FP8 products, where the checkpoint declares that activations are FP8."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.formats.fp8 import Fp8
from moebius_kernels.formats.rounded_activations import GROUP
from moebius_kernels.registry import Backend, Query
from moebius_kernels.rounded_products import linear as reference
from moebius_kernels.triton.admission import x_refusal
from moebius_kernels.triton.fp8_activations import rounded_activations

# With fewer, the matrix's bytes take the time, of which `linear.py` reads as many.
_FEWEST_TOKENS = 64
# cuBLAS takes multiples of so many tokens, rows and columns.
_TOKENS, _ROWS, _COLUMNS = 4, 16, 4 * GROUP


def linear(x: torch.Tensor, blocks: Sequence[StoredMatrix], bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference in `rounded_products.py`; x bf16."""
    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % _TOKENS
    # Of no rows more it would make a copy, too.
    rounded = rounded_activations(F.pad(rows, (0, 0, 0, missing)) if missing else rows)
    outputs = [
        torch._scaled_mm(
            rounded.codes,
            block.parts["data"].T,
            rounded.scale,
            block.parts["scale"].T,
            out_dtype=x.dtype,
        )[: len(rows)]
        for block in blocks
    ]
    y = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], y.shape[-1])


def _admits(query: Query) -> str | None:
    if reason := x_refusal(query, _FEWEST_TOKENS):
        return reason
    for matrix in query.matrices:
        if not isinstance(matrix.format, Fp8) or not matrix.format.rounds_activations:
            return f"the checkpoint does not declare that activations of {matrix.format.name} are rounded"
        if (matrix.format.block_rows, matrix.format.block_columns) != (GROUP, GROUP):
            return f"cuBLAS multiplies blocks of {GROUP}x{GROUP}, not {matrix.format.name}"
        if matrix.shape[0] % _ROWS or matrix.shape[1] % _COLUMNS:
            return f"cuBLAS does not take {matrix.shape[0]} rows of {matrix.shape[1]}"
    return None


BACKENDS = (
    Backend(
        "linear",
        "cublas_fp8",
        linear,
        # Where cuBLAS has them.
        architectures=frozenset({(9, 0)}),
        admits=_admits,
        reference=reference,
    ),
)
