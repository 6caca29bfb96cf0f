"""The product that experts and dense layers share: rows of x times the matrix that each of them goes to."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moebius_kernels.triton.decode import codes_an_element, codes_of_row, octet_hint
from moebius_kernels.triton.tile_products import appended, products


@triton.jit(do_not_specialize_on_alignment=["pairs"])
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
    ASM: tl.constexpr, IN_ORDER: tl.constexpr, OVERLAP: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """y[pair, n] = x[pair // PAIRS_OF_X] . W[slot of the pair, n] for n < N; bf16, or fp32 if SPLITS > 1.

    A program has a tile of pairs of one slot, in at most PARTS of TOKENS each with products of their own,
    ROWS of the matrix's rows, and one of SPLITS shares of the columns, whose results are `y_split` numbers
    apart. ROUTING says where tiles come from: "dense" (row i is pair i, one matrix),
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

    TILE: tl.constexpr = TOKENS * PARTS
    slot = tl.zeros((), tl.int64)
    # Of the tile, the first pair or where it is, and how many there are from there on.
    first = tile
    count = tl.full((), 1, tl.int32)
    if ROUTING == "dense":
        first = tile * TILE
        count = pairs - first
    elif ROUTING == "tiles":
        slot = tl.load(tiles + 3 * tile).to(tl.int64)
        if slot < 0:
            return
        first = tl.load(tiles + 3 * tile + 1)
        count = tl.load(tiles + 3 * tile + 2) - first
    else:
        slot = _slot(experts + tile, slots, SLOTS)
        if slot < 0:
            return
    pair = tl.arange(0, PAIRS)
    rank = pair
    if ROUTING == "group":
        expert = tl.load(experts + pair, pair < pairs, -1)
        same = expert == tl.load(experts + tile)
        rank = tl.cumsum(same.to(tl.int32), 0) - 1
        mine = tl.sum(tl.where(pair == tile, rank, 0), 0)
        # The first of each TILE pairs has the tile.
        if mine % TILE != 0:
            return
        rank = tl.where(same, rank - mine, -1)
        count = tl.max(rank, 0) + 1
    rows = ()
    for part in tl.static_range(PARTS):
        at = part * TOKENS + tl.arange(0, TOKENS)
        if ROUTING == "tiles":
            found = tl.load(sorted_pairs + first + at, at < count, -1)
        elif ROUTING == "group":
            found = _pairs_of_rank(pair, rank, at)
        else:
            found = tl.where(at < count, first + at, -1)
        rows = appended(rows, found)

    n = block * ROWS + tl.arange(0, ROWS)
    # Rows beyond the last are read as the last, and not stored.
    m = tl.minimum(n, N - 1)
    blocks_of_slot = (rows_of_slot + BLOCK_ROWS - 1) // BLOCK_ROWS
    row = slot * rows_of_slot + m
    block_row = slot * blocks_of_slot + m // BLOCK_ROWS
    up = row + up_row
    up_block_row = slot * blocks_of_slot + (m + up_row) // BLOCK_ROWS

    # Of codes, each of four threads has 8 columns of a product: of fewer, Triton 3.6 multiplies some twice
    # and others not at all.
    tl.static_assert(CODE == "bf16" or COLUMNS >= 32 * DEPTH, "a group of warps needs 32 columns")
    STEPS: tl.constexpr = (C + SPLITS * COLUMNS - 1) // (SPLITS * COLUMNS)
    begin = split * (STEPS * COLUMNS)
    if OVERLAP and PREFETCH:
        _prefetch(codes, row, begin, C, CODE, STEPS * COLUMNS)
        gdc_wait()
        gdc_launch_dependents()
    hint = octet_hint(codes)
    GATES: tl.constexpr = 1 if ACTIVATION == "" else 2
    bias_row = bias + slot * (GATES * N)
    y += split * y_split
    if PARTS == 1:
        products(
            x, y, y_stride, rows,
            codes, high, scale, extra, row_scale, row, block_row,
            up_codes, up_high, up_scale, up_extra, up_row_scale, up, up_block_row,
            hint, begin, bias_row, m, n,
            N, C, CODE, SCALES, GROUP, ROW_SCALE, BIAS, ACTIVATION, LIMIT, ALPHA,
            PAIRS_OF_X, TOKENS, 1, ROWS, COLUMNS, SPLITS, DEPTH, SWAP, POLICY, ASM, IN_ORDER,
        )  # fmt: skip
    else:
        # Parts without pairs cost nothing.
        parts = tl.minimum((count + TOKENS - 1) // TOKENS, PARTS)
        for used in tl.static_range(1, PARTS + 1):
            if parts == used:
                products(
                    x, y, y_stride, rows,
                    codes, high, scale, extra, row_scale, row, block_row,
                    up_codes, up_high, up_scale, up_extra, up_row_scale, up, up_block_row,
                    hint, begin, bias_row, m, n,
                    N, C, CODE, SCALES, GROUP, ROW_SCALE, BIAS, ACTIVATION, LIMIT, ALPHA,
                    PAIRS_OF_X, TOKENS, used, ROWS, COLUMNS, SPLITS, DEPTH, SWAP, POLICY, ASM, IN_ORDER,
                )  # fmt: skip


@triton.jit
def _pairs_of_rank(pair, rank, wanted):
    """The pair of each rank, -1 where there is none."""
    return tl.max(tl.where(rank[None, :] == wanted[:, None], pair[None, :], -1), 1)


@triton.jit
def _prefetch(codes, row, begin, C: tl.constexpr, CODE: tl.constexpr, COUNT: tl.constexpr):
    """Columns `begin` to `begin + COUNT` of the rows' codes, into the L2 by its lines of 128 bytes."""
    PER: tl.constexpr = codes_an_element(CODE)
    LINE: tl.constexpr = 1024 // codes.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((COUNT // PER + LINE - 1) // LINE)
    WIDTH: tl.constexpr = codes_of_row(CODE, C)
    at = tl.minimum(begin // PER + LINE * tl.arange(0, LINES), WIDTH - 1)
    address = (codes + (row * WIDTH)[:, None] + at[None, :]).to(tl.int64)
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
