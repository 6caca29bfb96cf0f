"""The product that experts and dense layers share: rows of x times the matrix that each of them goes to."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.triton.decode import accumulator_factor, codes_an_element, load_tile, octet_hint


@triton.jit
def grouped_gemm(
    x, y,
    codes, high, scale, extra, row_scale,
    up_codes, up_high, up_scale, up_extra, up_row_scale,
    bias, experts, slots, sorted_pairs, tiles, pairs, rows_of_slot, up_row, y_stride, y_split,
    N: tl.constexpr, C: tl.constexpr, CODE: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, ROW_SCALE: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    ROUTING: tl.constexpr, PAIRS: tl.constexpr, SLOTS: tl.constexpr, PAIRS_OF_X: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr, POLICY: tl.constexpr,
    ASM: tl.constexpr, OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """y[pair, n] = x[pair // PAIRS_OF_X] . W[slot of the pair, n] for n < N; bf16, or fp32 if SPLITS > 1.

    A program has a tile of at most TOKENS pairs of one slot, or twice as many in two PARTS, each with
    products of its own, ROWS of the matrix's rows, and one of SPLITS shares of the columns, whose results are
    `y_split` numbers apart. ROUTING says where tiles come from: "dense" (row i is pair i, one matrix),
    "single" (a tile a pair), "group" (each program finds those of its pairs that go to the same slot; PAIRS
    at most), "tiles" (from `align.py`). With an ACTIVATION the matrix has 2 N rows, gate rows in `codes` and
    up rows in `up_codes` from `up_row` on.

    PREFETCH (with OVERLAP): only x comes from the kernel before this one, the rest is older, so that codes
    can be fetched while that kernel ends.
    """
    if OVERLAP and not PREFETCH:
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    BLOCKS: tl.constexpr = (N + ROWS - 1) // ROWS
    block = program % BLOCKS
    split = program // BLOCKS % SPLITS
    tile = program // (BLOCKS * SPLITS)

    lane = tl.arange(0, TOKENS)
    TILE: tl.constexpr = TOKENS * PARTS
    more = lane + (TILE - TOKENS)
    slot = tl.zeros((), tl.int64)
    if ROUTING == "dense":
        rows = tile * TILE + lane
        rows = tl.where(rows < pairs, rows, -1)
        more_rows = tile * TILE + more
        more_rows = tl.where(more_rows < pairs, more_rows, -1)
    elif ROUTING == "tiles":
        slot = tl.load(tiles + 3 * tile).to(tl.int64)
        if slot < 0:
            return
        first = tl.load(tiles + 3 * tile + 1)
        last = tl.load(tiles + 3 * tile + 2)
        rows = tl.load(sorted_pairs + first + lane, first + lane < last, -1)
        more_rows = tl.load(sorted_pairs + first + more, first + more < last, -1)
    else:
        slot = _slot(experts + tile, slots, SLOTS)
        if slot < 0:
            return
        if ROUTING == "single":
            rows = tl.where(lane == 0, tile, -1)
            more_rows = tl.full((TOKENS,), -1, tl.int32)
        else:
            pair = tl.arange(0, PAIRS)
            expert = tl.load(experts + pair, pair < pairs, -1)
            same = expert == tl.load(experts + tile)
            rank = tl.cumsum(same.to(tl.int32), 0) - 1
            mine = tl.sum(tl.where(pair == tile, rank, 0), 0)
            # The first of each TILE pairs has the tile.
            if mine % TILE != 0:
                return
            rank = tl.where(same, rank - mine, -1)
            rows = _pairs_of_rank(pair, rank, lane)
            more_rows = _pairs_of_rank(pair, rank, more)

    x_at = _x_pointers(x, rows, C, PAIRS_OF_X)
    more_x_at = _x_pointers(x, more_rows, C, PAIRS_OF_X)
    n = block * ROWS + tl.arange(0, ROWS)
    # Rows beyond the last are read as the last, and not stored.
    m = tl.minimum(n, N - 1)
    blocks_of_slot = (rows_of_slot + BLOCK_ROWS - 1) // BLOCK_ROWS
    row = slot * rows_of_slot + m
    block_row = slot * blocks_of_slot + m // BLOCK_ROWS
    up = row + up_row
    up_block_row = slot * blocks_of_slot + (m + up_row) // BLOCK_ROWS

    # See `_settled`.
    SETTLE: tl.constexpr = ASM and SWAP and TOKENS >= 64 and CODE != "bf16"
    STEPS: tl.constexpr = (C + SPLITS * COLUMNS - 1) // (SPLITS * COLUMNS)
    EVEN: tl.constexpr = C == SPLITS * STEPS * COLUMNS
    begin = split * (STEPS * COLUMNS)
    if OVERLAP and PREFETCH:
        _prefetch(codes, row, begin, C, CODE, STEPS * COLUMNS)
        gdc_wait()
        gdc_launch_dependents()
    hint = octet_hint(codes)
    gate_sum = _zeros(TOKENS, ROWS, DEPTH, SWAP)
    up_sum = _zeros(TOKENS, ROWS, DEPTH, SWAP)
    more_gate_sum = _zeros(TOKENS, ROWS, DEPTH, SWAP)
    more_up_sum = _zeros(TOKENS, ROWS, DEPTH, SWAP)
    for step in range(STEPS):
        column = begin + step * COLUMNS
        x_tile = _load_x(x_at, rows, column, C, COLUMNS, EVEN)
        w = load_tile(
            codes, high, scale, extra, hint, row, block_row, column,
            C, EVEN, CODE, SCALES, GROUP, ROWS, COLUMNS, ASM, POLICY, TOKENS > 32,
        )  # fmt: skip
        gate_sum = _dot(x_tile, w, gate_sum, DEPTH, SWAP, ASM)
        if PARTS == 2:
            more_x_tile = _load_x(more_x_at, more_rows, column, C, COLUMNS, EVEN)
            more_gate_sum = _dot(more_x_tile, w, more_gate_sum, DEPTH, SWAP, ASM)
        if ACTIVATION != "":
            w = load_tile(
                up_codes, up_high, up_scale, up_extra, hint, up, up_block_row, column,
                C, EVEN, CODE, SCALES, GROUP, ROWS, COLUMNS, ASM, POLICY, TOKENS > 32,
            )  # fmt: skip
            up_sum = _dot(x_tile, w, up_sum, DEPTH, SWAP, ASM)
            if PARTS == 2:
                more_up_sum = _dot(more_x_tile, w, more_up_sum, DEPTH, SWAP, ASM)
        if SETTLE:
            gate_sum = _settled(gate_sum)
            if ACTIVATION != "":
                up_sum = _settled(up_sum)

    GATES: tl.constexpr = 1 if ACTIVATION == "" else 2
    bias_row = bias + slot * (GATES * N)
    y += split * y_split
    _store(
        y, y_stride, gate_sum, up_sum, rows, row_scale, up_row_scale, row, up, bias_row, m, n,
        N, CODE, ROW_SCALE, BIAS, ACTIVATION, LIMIT, ALPHA, DEPTH, SWAP, ASM,
    )  # fmt: skip
    if PARTS == 2:
        _store(
            y, y_stride, more_gate_sum, more_up_sum, more_rows,
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
        value = _activate(value, up_value, ACTIVATION, LIMIT, ALPHA)
    y_rows = rows.to(tl.int64) * y_stride
    if SWAP:
        keep = (n < N)[:, None] & (rows >= 0)[None, :]
        tl.store(y + y_rows[None, :] + n[:, None], value.to(y.dtype.element_ty), keep)
    else:
        keep = (n < N)[None, :] & (rows >= 0)[:, None]
        tl.store(y + y_rows[:, None] + n[None, :], value.to(y.dtype.element_ty), keep)


@triton.jit
def _pairs_of_rank(pair, rank, wanted):
    """The pair of each rank, -1 where there is none."""
    return tl.max(tl.where(rank[None, :] == wanted[:, None], pair[None, :], -1), 1)


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
def _prefetch(codes, row, begin, C: tl.constexpr, CODE: tl.constexpr, COUNT: tl.constexpr):
    """Columns `begin` to `begin + COUNT` of the rows' codes, into the L2 by its lines of 128 bytes."""
    PER: tl.constexpr = codes_an_element(CODE)
    LINE: tl.constexpr = 1024 // codes.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((COUNT // PER + LINE - 1) // LINE)
    at = tl.minimum(begin // PER + LINE * tl.arange(0, LINES), C // PER - 1)
    address = (codes + (row * (C // PER))[:, None] + at[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _slot(expert_at, slots, SLOTS: tl.constexpr):
    """Where the expert is, int64; -1 for none."""
    slot = tl.load(expert_at).to(tl.int64)
    if SLOTS:
        slot = tl.load(slots + slot, slot >= 0, -1).to(tl.int64)
    return slot


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
def _activate(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
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
