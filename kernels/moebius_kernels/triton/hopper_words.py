"""Words of codes in the registers in which Hopper's products read their first operand: 64 rows, 16 a warp.

The columns of a word are those that one lane has of such an operand: four lanes side by side have the four
words of 32 columns, and each has two rows. So no number moves, which the compiler is told to hold to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moebius_kernels.triton.decode_words import columns_of_word, expanded, per_word, word_factors

_TILE_ROWS, _COLUMNS = gl.constexpr(64), gl.constexpr(128)
# The same text, in Gluon's language.
_word_factors, _expanded = gluon.jit(word_factors.fn), gluon.jit(expanded.fn)
_LANES, _WARPS = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
_WORDS_OF = gl.constexpr(gl.DistributedLinearLayout([[8, 0], [0, 4], [0, 8]], _LANES, _WARPS, [], [64, 16]))
_CHUNK_OF = gl.constexpr(gl.DistributedLinearLayout([[8, 0], [0, 4]], _LANES, _WARPS, [], [64, 8]))
# Of factors each lane has those of its rows.
_FACTORS_OF = gl.constexpr(
    gl.SliceLayout(
        2,
        gl.DistributedLinearLayout(
            [[8, 0, 0], [0, 1, 0]],
            [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            [[16, 0, 0], [32, 0, 0]],
            [],
            [64, 2, 4],
        ),
    )
)
_SHARED_LANES = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
_ONE_OF = gl.constexpr(gl.DistributedLinearLayout([[8, 0]], _SHARED_LANES, _WARPS, [], [64, 1]))
_TWO_OF = gl.constexpr(gl.DistributedLinearLayout([[8, 0], [0, 1]], _SHARED_LANES, _WARPS, [], [64, 2]))
_FOUR_OF = gl.constexpr(
    gl.DistributedLinearLayout([[8, 0], [0, 1], [0, 2]], _SHARED_LANES, _WARPS, [], [64, 4])
)


@gluon.jit
def chunks(
    words, factors, FIRST: gl.constexpr, CODE: gl.constexpr, SCALES: gl.constexpr, GROUP: gl.constexpr
):
    """Words [64, 8] and factors [64, 2 or 1] of each half of 128 columns, as `numbers` takes them.

    `words` int32 [rows, 16] and `factors` int32 [rows, 4, 2 or 1] are in shared memory; rows from FIRST on.
    """
    OF_WORD: gl.constexpr = columns_of_word(CODE, SCALES, GROUP)
    part = factors.slice(FIRST, _TILE_ROWS, 0)
    if OF_WORD >= _COLUMNS:
        packed = part.load(_ONE_OF)
    elif 2 * OF_WORD == _COLUMNS:
        packed = part.load(_TWO_OF)
    else:
        packed = part.load(_FOUR_OF)
    found = _word_factors(packed, per_word(CODE, SCALES), CODE, _TILE_ROWS, True)
    own = words.slice(FIRST, _TILE_ROWS, 0).load(_WORDS_OF)
    early_words, late_words = own.reshape([_TILE_ROWS, 2, _COLUMNS // 16]).permute((0, 2, 1)).split()
    if found.shape[1] > 1:
        halves = found.reshape([_TILE_ROWS, 2, found.shape[1] // 2]).permute((0, 2, 1))
        early_factors, late_factors = halves.split()
    else:
        early_factors, late_factors = found, found
    return (early_words, early_factors), (late_words, late_factors)


@gluon.jit
def numbers(chunk, CODE: gl.constexpr, SCALES: gl.constexpr, MMA: gl.constexpr):
    """bf16 [64, 64], the numbers (of E2M1 2^-8 of them), as the first operand of products whose sums have the
    layout MMA."""
    words, factors = chunk
    words = gl.convert_layout(words, _CHUNK_OF, assert_trivial=True)
    factors = gl.convert_layout(factors, _FACTORS_OF, assert_trivial=True)
    found = _expanded(words, factors, CODE, SCALES, _TILE_ROWS, _COLUMNS // 2, True, True)
    return gl.convert_layout(found, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
