"""How the work of a product is cut up, by its shape."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's tile: at most `tokens` rows of x by `rows` of the matrix, `columns` at a time, shared by
    `splits` programs, and in a program by `depth` groups of warps. `swap`: the matrix is the side of the tensor cores' product that has 16 rows or 64, so
    that 8 tokens fill the other."""

    tokens: int
    rows: int
    columns: int
    warps: int = 4
    stages: int = 4
    splits: int = 1
    depth: int = 1
    swap: bool = True


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """`gate_up` and `down` have tiles of as many tokens."""

    gate_up: Tiling
    down: Tiling
