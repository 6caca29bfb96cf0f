"""Softmax as it grows, of groups of four warps that multiply for Hopper (`prefill_attention_hopper.py`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moebius_kernels.device_plan import TILE_ROWS

# Of a group, and of a step.
ROWS, KEYS = gl.constexpr(TILE_ROWS // 2), gl.constexpr(128)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))


@gluon.jit
def weigh(
    scores, largest, total, n, start, factor,
    MASKED: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Weights of tile n's keys as products take them, the largest score so far and the sum of weights, and to
    what fades whatever was before."""
    if MASKED:
        position = start + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        key = n * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
        scores = _hidden(scores, key[None, :], position[:, None])
        if WINDOW > 0:
            scores = _hidden(scores, position[:, None], key[None, :] + (WINDOW - 1))
    most = gl.maximum(largest, gl.max(scores, 1))
    shift = most * factor
    if MASKED:
        # A row that has seen no key yet keeps its sums of zero.
        shift = gl.where(most == float("-inf"), 0.0, shift)
    # One fused operation a score.
    weights = gl.exp2(scores * factor - shift[:, None])
    fade = gl.exp2(largest * factor - shift)
    total = total * fade + gl.sum(weights, 1)
    return weights, most, total, fade


@gluon.jit
def _hidden(scores, one, other):
    """-inf where one > other. The assembler would make all comparisons before it needs the first."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p; }", "=f,f,r,r",
        [scores, one, other], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def pairs_of(x):
    """Two neighbours of x fp32 [M, N] as bf16 in a word: int32 [M, N / 2]. From one turn of a loop to
    the next halves of words would go by themselves and be put together each time."""
    early, late = x.reshape([x.shape[0], x.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [early, late], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def numbers_of(pairs, LAYOUT: gl.constexpr):
    """The opposite."""
    early, late = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    x = gl.join(early, late).reshape([pairs.shape[0], 2 * pairs.shape[1]])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)
