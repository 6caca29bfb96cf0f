"""Which tilings are tried, by form, widths and token count."""

from collections.abc import Iterable
from dataclasses import replace

from moebius_kernels.triton.dense_tiling import DenseShape
from moebius_kernels.triton.expert_tiling import ExpertShape
from moebius_kernels.triton.tiling import WIDE, Tiling

# Of y: more than these are products that no step has.
_MOST_OUTPUTS = 1 << 27
# Columns that several programs may share where programs are few.
_LONG = 2048

Pairs = tuple[list[Tiling], list[Tiling]]


def expert_candidates(shape: ExpertShape, tokens: int) -> list[Pairs]:
    """For each height of tiles that is worth it, what is tried for gate and up, and for down."""
    expected = tokens * shape.top_k / shape.experts
    words = shape.gate_up.endswith("_words") and shape.down.endswith("_words")
    found: list[Pairs] = []
    if expected <= 5:
        gate_ups, downs = (_eight(code, expected) for code in (shape.gate_up, shape.down))
        downs += [replace(tile, prefetch=True) for tile in downs[:3]]
        if expected <= 1 and shape.inner >= _LONG:
            downs += [replace(downs[0], splits=splits) for splits in (2, 3)]
        found.append((gate_ups, downs))
    if words:
        found += [(tiles, tiles) for tiles in _four_warps(expected)]
    else:
        if 2 < expected <= 16:
            found.append((_sixteen(shape.gate_up), _sixteen(shape.down)))
        if 6 <= expected <= 40:
            some = [Tiling(32, 64, 128, 4, 3), Tiling(32, 64, 64, 4, 4), Tiling(32, 128, 64, 4, 4)]
            found.append((some, some))
    if 12 <= expected <= 64:
        some = [Tiling(64, 64, 64, 4, 4), Tiling(64, 128, 64, 4, 4)]
        found.append((some, some))
    if expected >= 64:
        downs = [Tiling(128, 128, 64, 8, 3), Tiling(128, 128, 64, 4, 3)]
        downs += [replace(tile, swap=False) for tile in downs]
        downs += [Tiling(128, 128, 128, 8, 2), Tiling(128, 64, 128, 4, 3)] * words
        found.append((_tall(shape.gate_up), downs))
        found.append(
            (
                [Tiling(64, 64, 64, 4, 4), Tiling(64, 128, 64, 8, 3), Tiling(64, 128, 64, 4, 3)],
                [Tiling(64, 128, 64, 4, 4), Tiling(64, 128, 64, 8, 3)],
            )
        )
    if words:
        # Their rows are padded, so that no load of theirs has to be narrow.
        return found
    return [(_even(gate_ups, shape.hidden), _even(downs, shape.inner)) for gate_ups, downs in found]


def _four_warps(expected: float) -> list[list[Tiling]]:
    """Of words, which products of four warps take without detour: from few tokens on; and in parts."""
    found = []
    if 0.5 < expected <= 16:
        found.append(
            [
                Tiling(16, 64, 128, 4, 4),
                Tiling(16, 128, 128, 8, 3),
                Tiling(16, 64, 256, 4, 3),
                Tiling(16, 128, 128, 4, 3),
                Tiling(16, 64, 128, 4, 5),
            ]
        )
    if 4 <= expected <= 16:
        # Products of single warps, a second one only where an expert has more than 8.
        found.append(
            [
                Tiling(16, 64, 256, 4, 3, parts=2),
                Tiling(16, 64, 128, 4, 4, parts=2),
                Tiling(16, 128, 128, 4, 3, parts=2),
            ]
        )
    if 4 <= expected <= 40:
        found.append(
            [
                Tiling(32, 64, 128, 4, 4),
                Tiling(32, 128, 128, 8, 3),
                Tiling(32, 64, 256, 4, 3),
                Tiling(32, 128, 128, 4, 3),
                Tiling(32, 64, 128, 4, 3),
                Tiling(32, 128, 64, 4, 4),
            ]
        )
    if 12 <= expected <= 64:
        found.append([Tiling(64, 64, 128, 4, 3), Tiling(64, 128, 128, 8, 3)])
    return found


def _eight(code: str, expected: float) -> list[Tiling]:
    """`expected`: tokens of an expert; where they are few, so are programs, and warps share columns."""
    few = expected <= 0.13
    if code in WIDE:
        found = [
            Tiling(8, 64, 128, 4, 3),
            Tiling(8, 32, 128, 2, 4),
            Tiling(8, 16, 128, 1, 5),
            Tiling(8, 64, 128, 2, 4),
        ]
        return found + [Tiling(8, 64, 64, 4, 5), Tiling(8, 16, 256, 2, 3, depth=2)] * few
    found = [
        Tiling(8, 64, 256, 4, 3),
        Tiling(8, 32, 256, 2, 3),
        Tiling(8, 64, 256, 2, 3),
        Tiling(8, 64, 128, 4, 4),
        Tiling(8, 64, 128, 2, 4),
        Tiling(8, 32, 128, 2, 5),
        Tiling(8, 64, 256, 4, 3, registers=96),
    ]
    return found + [Tiling(8, 16, 256, 2, 4, depth=2)] * few


def _sixteen(code: str) -> list[Tiling]:
    columns = 128 if code in WIDE else 256
    found = [
        Tiling(16, 32, columns, 2, 4),
        Tiling(16, 64, columns, 4, 3),
        Tiling(16, 64, 128, 4, 4),
        Tiling(16, 128, 128, 4, 3),
        Tiling(16, 128, 128, 8, 3),
    ]
    if code not in WIDE:
        found += [Tiling(16, 64, columns, 4, 3, parts=2), Tiling(16, 32, columns, 2, 3, parts=2)]
        found += [Tiling(16, 128, columns, 8, 3), Tiling(16, 128, columns, 4, 2)]
    else:
        found += [Tiling(16, 128, 64, 4, 4), Tiling(16, 256, 64, 8, 4)]
    return found


def _tall(code: str) -> list[Tiling]:
    """For gate and up, whose sums take twice the registers."""
    if code == "bf16":
        return [Tiling(128, 128, 64, 8, 4), Tiling(128, 128, 64, 8, 3)]
    return [
        Tiling(128, 64, 128, 4, 2),
        Tiling(128, 64, 64, 4, 3),
        Tiling(128, 64, 64, 4, 4),
        Tiling(128, 128, 64, 8, 3),
        Tiling(128, 128, 64, 8, 3, swap=False),
        Tiling(128, 64, 64, 8, 3, swap=False),
        Tiling(128, 64, 64, 4, 3, swap=False),
    ]


def dense_candidates(shape: DenseShape, tokens: int) -> list[Tiling]:
    if tokens * shape.rows > _MOST_OUTPUTS:
        return []
    if tokens <= 32:
        tile = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
        step = 128 if shape.code in WIDE else 256
        few = [
            Tiling(tile, 64, step, 4, 3),
            Tiling(tile, 32, step, 2, 4),
            Tiling(tile, 16, step, 1, 4),
            Tiling(tile, 16, 2 * step, 2, 4, depth=2),
            Tiling(tile, 16, 4 * step, 4, 3, depth=4),
            Tiling(tile, 32, 2 * step, 4, 3, depth=2),
            Tiling(tile, 64, 64, 4, 5),
        ]
    else:
        few = [
            Tiling(64, 64, 64, 4, 4),
            Tiling(64, 32, 128, 4, 3),
            Tiling(64, 16, 128, 4, 4),
            Tiling(64, 32, 64, 4, 5),
            Tiling(32, 32, 128, 2, 3),
            Tiling(32, 64, 64, 4, 4),
            Tiling(64, 128, 64, 4, 4),
            Tiling(64, 128, 64, 8, 4),
        ]
        if tokens > 64:
            few += [Tiling(128, 64, 64, 4, 4), Tiling(128, 32, 64, 4, 5), Tiling(128, 64, 64, 8, 4)]
    return [
        replace(one, splits=splits)
        for one in _even(few, shape.columns)
        for splits in (1, 2, 3, 4, 5, 8)
        if splits == 1 or _worth(one, splits, shape, tokens)
    ]


def _worth(one: Tiling, splits: int, shape: DenseShape, tokens: int) -> bool:
    """Fewer programs than fill the chip, down to two steps each; odd shares where columns divide so."""
    blocks = -(-shape.rows // one.rows) * -(-tokens // one.tokens)
    enough = blocks * splits <= 800 and shape.columns >= 2 * splits * one.columns
    return enough and (splits % 2 == 0 or shape.columns % (splits * one.columns) == 0)


def _even(tilings: Iterable[Tiling], columns: int) -> list[Tiling]:
    """With narrower steps for those that would end beyond the columns: no load has to be masked then.

    Steps are powers of two, so that widths such as 2880 and 704 leave 64.
    """
    found: dict[Tiling, None] = {}
    for one in tilings:
        found[one] = None
        step = columns & -columns
        if one.columns > step >= max(64, 32 * one.depth):
            stages = one.stages + (1 if one.columns > 2 * step else 0) + 1
            found[replace(one, columns=step, stages=min(stages, 5))] = None
    return list(found)
