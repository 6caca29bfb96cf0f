"""How the work of a product is cut up, by its shape."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

# Codes of layouts whose numbers take a byte or more each.
WIDE = ("bf16", "e4m3", "int8")


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's tile: at most `tokens` rows of x by `rows` of the matrix, `columns` at a time.

    `splits` programs share the columns, and in a program `depth` groups of warps. The tokens may be in
    `parts`, products of their own with the same numbers of the matrix, as many as there are tokens for.
    `registers`: the most that a thread may have, 0 for any. `swap`: the matrix is the side of the tensor
    cores' product that has 16 rows or 64, so that 8 tokens fill the other. `prefetch`: of a kernel to whose
    predecessor only x is owed, here that of down: it fetches codes into the L2 while its predecessor ends.
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


class Measured(Protocol):
    """Something that was measured with so many tokens."""

    @property
    def tokens(self) -> int: ...


M = TypeVar("M", bound=Measured)
# How far from its own token count a measurement may serve.
_REACH = 2.0


def nearest(measured: Iterable[M], tokens: int) -> M | None:
    """The one with the nearest number of tokens, None if none is near."""

    def distance(one: Measured) -> float:
        return abs(math.log(one.tokens / tokens))

    # One token has kernels of its own.
    near = [
        one for one in measured if (one.tokens == 1) == (tokens == 1) and distance(one) <= math.log(_REACH)
    ]
    return min(near, key=distance, default=None)


def record_of(tiling: Tiling) -> Mapping[str, Any]:
    """What differs from the defaults."""
    usual = asdict(Tiling(0, 0, 0))
    return {name: value for name, value in asdict(tiling).items() if value != usual[name]}
