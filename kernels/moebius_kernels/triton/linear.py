"""Dense layers: the experts' product with one matrix and without routing.

Few tokens make few tiles; then several programs share the columns of each, and a second kernel adds up. Many
tokens are for the library, whose tiles are faster than the expansion of the matrix is slow.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.format import StoredMatrix
from moebius_kernels.launch import launch
from moebius_kernels.registry import Backend, Query
from moebius_kernels.triton.admission import x_refusal
from moebius_kernels.triton.dense_tiling import DenseShape, by_library, dense_tiling
from moebius_kernels.triton.expand import expanded
from moebius_kernels.triton.gemm import Routing, gemm, layout_for
from moebius_kernels.triton.layouts import layout_of
from moebius_kernels.triton.targets import ARCHITECTURES, ceil_div, overlapping, power_of_two
from moebius_kernels.triton.tiling import Tiling


def linear(x: torch.Tensor, blocks: Sequence[StoredMatrix], bias: torch.Tensor | None = None) -> torch.Tensor:
    """As the reference; x bf16. Raises ValueError for forms that kernels do not read."""
    rows = x.reshape(-1, x.shape[-1])
    if len(blocks) == 1 and by_library(len(rows), blocks[0].format, blocks[0].shape):
        # With the bias in the same launch.
        return F.linear(x, _in_bf16(blocks[0]), bias)
    y = torch.empty(len(rows), sum(block.shape[0] for block in blocks), dtype=x.dtype, device=x.device)
    start = 0
    for block in blocks:
        stop = start + block.shape[0]
        own_bias, own_y = None if bias is None else bias[start:stop], y[:, start:stop]
        if by_library(len(rows), block.format, block.shape):
            multiply_expanded(rows, block, own_bias, own_y)
        else:
            shape = DenseShape(layout_for(block).code, *block.shape)
            tiled_linear(rows, block, own_bias, own_y, dense_tiling(power_of_two(len(rows)), shape))
        start = stop
    return y.view(*x.shape[:-1], y.shape[-1])


def multiply_expanded(
    x: torch.Tensor, block: StoredMatrix, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    """x [T, C], y [T, R] as of `tiled_linear`, by way of the matrix in bf16."""
    torch.mm(x, _in_bf16(block).T, out=y)
    if bias is not None:
        y += bias


def _in_bf16(block: StoredMatrix) -> torch.Tensor:
    return block.parts["data"] if isinstance(block.format, Dense) else expanded(block)


def tiled_linear(
    x: torch.Tensor, block: StoredMatrix, bias: torch.Tensor | None, y: torch.Tensor, tiling: Tiling
) -> None:
    """x [T, C], y [T, R]: rows side by side, perhaps those of a wider matrix."""
    tokens = len(x)
    routing = Routing("dense", tokens, ceil_div(tokens, tiling.tokens))
    if tiling.splits == 1:
        gemm(x, block, y[None], routing, tiling, bias=bias, stream=tokens <= tiling.tokens)
        return
    width = y.shape[1]
    shares = torch.empty(tiling.splits, tokens, width, dtype=torch.float32, device=x.device)
    gemm(x, block, shares, routing, tiling, stream=tokens <= tiling.tokens)
    launch(
        _sum_shares,
        (tokens * ceil_div(width, 512),),
        shares, x if bias is None else bias, y, tokens, y.stride(0),
        BIAS=bias is not None, WIDTH=width, SPLITS=tiling.splits, BLOCK=512, **overlapping(x),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _sum_shares(
    shares, bias, y, tokens, y_stride,
    BIAS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y[t] = the sum over splits, in their order, of shares[split, t], plus bias."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    at = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(shares + (split * tokens + token) * WIDTH + at, inside, 0.0)
    if BIAS:
        total += tl.load(bias + at, inside, 0.0).to(tl.float32)
    tl.store(y + token * y_stride + at, total.to(y.dtype.element_ty), inside)


def _admits(query: Query) -> str | None:
    if refused := x_refusal(query):
        return refused
    for matrix in query.matrices:
        if isinstance(reason := layout_of(matrix.format, matrix.shape[-1]), str):
            return reason
    return None


BACKENDS = (
    Backend(
        "linear",
        "triton",
        linear,
        architectures=ARCHITECTURES,
        admits=_admits,
    ),
)
