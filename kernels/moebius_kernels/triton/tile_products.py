"""A tile of a product: some rows of x times some of a matrix, what becomes of the sums, and their store."""

import triton
import triton.language as tl

from moebius_kernels.triton.decode import accumulator_factor, load_tile
from moebius_kernels.triton.decode_words import by_words, is_words


@triton.jit
def appended(values, one):
    """The tuple with one more."""
    return values + (one,)  # noqa: RUF005


@triton.jit
def products(
    x, y, y_stride, rows,
    codes, high, scale, extra, row_scale, row, block_row,
    up_codes, up_high, up_scale, up_extra, up_row_scale, up, up_block_row,
    hint, begin, bias_row, m, n,
    N: tl.constexpr, C: tl.constexpr, CODE: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    PAIRS_OF_X: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr,
    POLICY: tl.constexpr, ASM: tl.constexpr, IN_ORDER: tl.constexpr,
):  # fmt: skip
    """Those of the first PARTS of the tuple `rows`; all else as `grouped_gemm` has it."""
    # See `_settled`.
    SETTLE: tl.constexpr = ASM and SWAP and TOKENS >= 16 and CODE != "bf16"
    STEPS: tl.constexpr = (C + SPLITS * COLUMNS - 1) // (SPLITS * COLUMNS)
    EVEN: tl.constexpr = C == SPLITS * STEPS * COLUMNS
    x_at = ()
    gate_sums = ()
    up_sums = ()
    for part in tl.static_range(PARTS):
        x_at = appended(x_at, _x_pointers(x, rows[part], C, PAIRS_OF_X))
        gate_sums = appended(gate_sums, _zeros(TOKENS, ROWS, DEPTH, SWAP))
        up_sums = appended(up_sums, _zeros(TOKENS, ROWS, DEPTH, SWAP))
    for step in range(STEPS):
        column = begin + step * COLUMNS
        x_tiles = ()
        for part in tl.static_range(PARTS):
            x_tile = _load_x(x_at[part], rows[part], column, C, COLUMNS, EVEN)
            if is_words(CODE) and not IN_ORDER:
                x_tile = by_words(x_tile, TOKENS, COLUMNS)
            x_tiles = appended(x_tiles, x_tile)
        w = load_tile(
            codes, high, scale, extra, hint, row, block_row, column,
            C, EVEN, CODE, SCALES, GROUP, ROWS, COLUMNS, ASM, POLICY, TOKENS > 32, IN_ORDER,
        )  # fmt: skip
        gate_sums = _dots(x_tiles, w, gate_sums, PARTS, DEPTH, SWAP, ASM, SETTLE)
        if ACTIVATION != "":
            w = load_tile(
                up_codes, up_high, up_scale, up_extra, hint, up, up_block_row, column,
                C, EVEN, CODE, SCALES, GROUP, ROWS, COLUMNS, ASM, POLICY, TOKENS > 32, IN_ORDER,
            )  # fmt: skip
            up_sums = _dots(x_tiles, w, up_sums, PARTS, DEPTH, SWAP, ASM, SETTLE)
    for part in tl.static_range(PARTS):
        _store(
            y, y_stride, gate_sums[part], up_sums[part], rows[part],
            row_scale, up_row_scale, row, up, bias_row, m, n,
            N, CODE, ROW_SCALE, BIAS, ACTIVATION, LIMIT, ALPHA, DEPTH, SWAP, ASM,
        )  # fmt: skip


@triton.jit
def _store(
    y, y_stride, gate_sum, up_sum, rows, row_scale, up_row_scale, row, up, bias_row, m, n,
    N: tl.constexpr, CODE: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    DEPTH: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    FACTOR: tl.constexpr = accumulator_factor(CODE, ASM)
    value = _finish(gate_sum, row_scale, row, bias_row, m, FACTOR, ROW_SCALE, BIAS, DEPTH, SWAP)
    if ACTIVATION != "":
        up_value = _finish(up_sum, up_row_scale, up, bias_row + N, m, FACTOR, ROW_SCALE, BIAS, DEPTH, SWAP)
        value = activate(value, up_value, ACTIVATION, LIMIT, ALPHA)
    y_rows = rows.to(tl.int64) * y_stride
    if SWAP:
        keep = (n < N)[:, None] & (rows >= 0)[None, :]
        tl.store(y + y_rows[None, :] + n[:, None], value.to(y.dtype.element_ty), keep)
    else:
        keep = (n < N)[None, :] & (rows >= 0)[:, None]
        tl.store(y + y_rows[:, None] + n[None, :], value.to(y.dtype.element_ty), keep)


@triton.jit
def _x_pointers(x, rows, C: tl.constexpr, PAIRS_OF_X: tl.constexpr):
    """Of the rows of x that the pairs have, the first elements; for -1 any."""
    return x + (tl.where(rows >= 0, rows // PAIRS_OF_X, 0).to(tl.int64) * C)[:, None]


@triton.jit
def _load_x(x_at, rows, column, C: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr):
    at = column + tl.arange(0, COLUMNS)
    if EVEN:
        x_tile = tl.load(x_at + at[None, :], (rows >= 0)[:, None], 0.0)
    else:
        x_tile = tl.load(x_at + at[None, :], (rows >= 0)[:, None] & (at < C)[None, :], 0.0)
    return x_tile


@triton.jit
def _zeros(TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr):
    if DEPTH > 1:
        zeros = tl.zeros((DEPTH, ROWS, TOKENS), tl.float32)
    elif SWAP:
        zeros = tl.zeros((ROWS, TOKENS), tl.float32)
    else:
        zeros = tl.zeros((TOKENS, ROWS), tl.float32)
    return zeros


@triton.jit
def _dots(
    xs, w, totals,
    PARTS: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    found = ()
    for part in tl.static_range(PARTS):
        total = _dot(xs[part], w, totals[part], DEPTH, SWAP, ASM)
        if SETTLE:
            total = _settled(total)
        found = appended(found, total)
    return found


@triton.jit
def _dot(x, w, total, DEPTH: tl.constexpr, SWAP: tl.constexpr, ASM: tl.constexpr):
    if not ASM:
        # The interpreter multiplies the bits of bf16 numbers.
        x, w = x.to(tl.float32), w.to(tl.float32)
    if DEPTH > 1:
        # Each warp has its share of the columns.
        w = w.reshape(w.shape[0], DEPTH, w.shape[1] // DEPTH).permute(1, 0, 2)
        x = x.reshape(x.shape[0], DEPTH, x.shape[1] // DEPTH).permute(1, 2, 0)
        total = tl.dot(w, x, total)
    elif SWAP:
        total = tl.dot(w, x.trans(), total)
    else:
        total = tl.dot(x, w.trans(), total)
    return total


@triton.jit
def _settled(total):
    """The same, but computed: a use of the sums in each step, of no instruction.

    Hopper's products read the expanded numbers from registers while the program goes on, and Triton 3.6 lets
    some of them be under way when the next step begins, which puts its own numbers into these registers.
    """
    return tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _finish(
    total, row_scale, row, bias_row, m,
    FACTOR: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr, DEPTH: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    AXIS: tl.constexpr = 1 if SWAP else 0
    if DEPTH > 1:
        total = tl.sum(total, 0)
    if ROW_SCALE:
        total *= tl.expand_dims(tl.load(row_scale + row) * FACTOR, AXIS)
    elif FACTOR != 1.0:
        total *= FACTOR
    if BIAS:
        total += tl.expand_dims(tl.load(bias_row + m).to(tl.float32), AXIS)
    return total


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    if ACTIVATION == "silu":
        inner = gate
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 = sigmoid(2 z)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        gate = tl.minimum(gate, LIMIT)
        inner = ALPHA * gate
        up = tl.maximum(tl.minimum(up, LIMIT), -LIMIT) + 1
    return gate * tl.sigmoid(inner) * up
