"""How the work of a product is cut up, by its shape."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's tile: at most `tokens` rows of x by `rows` of the matrix, `columns` at a time.

    `splits` programs share the columns, and in a program `depth` groups of warps. The tokens may be in two
    `parts`, products of their own with the same numbers of the matrix. `registers`: the most that a thread
    may have, 0 for any. `swap`: the matrix is the side of the tensor cores' product that has 16 rows or 64,
    so that 8 tokens fill the other. `prefetch`: of a kernel to whose predecessor only x is owed, here that of
    down: it fetches codes into the L2 while its predecessor ends.
    """

    tokens: int
    rows: int
    columns: int
    warps: int = 4
    stages: int = 4
    splits: int = 1
    depth: int = 1
    parts: int = 1
    registers: int = 0
    swap: bool = True
    prefetch: bool = False


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """`gate_up` and `down` have tiles of as many tokens."""

    gate_up: Tiling
    down: Tiling


# Programs that keep an H100's 132 multiprocessors busy: four on each.
_PROGRAMS = 528


def dense_tiling(tokens: int, shape: tuple[int, ...], code: str) -> Tiling:
    """For a matrix of `shape` [R, C] whose codes are `code`."""
    rows, columns = shape
    wide = code in ("bf16", "e4m3", "int8")
    if tokens <= 32:
        tile = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
        step = 128 if wide or tile == 32 else 256
        one = Tiling(tile, 64, step, 4, 4 if wide else 3) if tile == 8 else Tiling(tile, 32, step, 2, 3)
        programs = -(-rows // one.rows)
        # At least two steps each, or adding up costs more than it gains.
        splits = max(1, min(_PROGRAMS // programs, columns // (2 * step), 16))
        return replace(one, splits=splits)
    if tokens <= 128:
        splits = max(1, min(264 // (-(-rows // 64) * -(-tokens // 64)), columns // 512, 8))
        return Tiling(64, 64, 64, 4, 4, splits=splits)
    return Tiling(128, 128, 64, 8, 3)
