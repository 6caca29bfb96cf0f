"""Which tiling serves which dense product: by a table of measurements, and by rules for other shapes."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from moebius_kernels.triton.tiling import Tiling, nearest, record_of

TABLE = Path(__file__).parent / "tables" / "hopper_dense.json"
_WIDE = ("bf16", "e4m3", "int8")


@dataclass(frozen=True, slots=True)
class DenseShape:
    """A matrix of `rows` by `columns` whose layout has the code `code`."""

    code: str
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class DenseMeasurement:
    shape: DenseShape
    tokens: int
    microseconds: float
    tiling: Tiling


def dense_tiling(tokens: int, shape: DenseShape) -> Tiling:
    found = nearest(_table().get(shape, ()), tokens)
    return rules(tokens, shape) if found is None else found.tiling


def rules(tokens: int, shape: DenseShape) -> Tiling:
    """From what was measured on an H200."""
    wide = shape.code in _WIDE
    step = 128 if wide else 256
    if tokens <= 16:
        tile = 8 if tokens <= 8 else 16
        return _split(Tiling(tile, 32, step, 2, 4 if tile == 8 else 3), shape, 1, programs=640)
    if tokens <= 32:
        one = Tiling(32, 64, 64, 4, 5) if wide else Tiling(32, 64, 256, 4, 3)
        return _split(one, shape, 1, programs=160 if wide else 320)
    if tokens <= 256:
        one = Tiling(64 if tokens <= 64 else 128, 64, 64, 4, 4)
        return _split(one, shape, -(-tokens // one.tokens), programs=320)
    return Tiling(128, 128, 64, 8, 3)


def _split(one: Tiling, shape: DenseShape, tiles: int, programs: int) -> Tiling:
    """About so many programs; each takes two steps at least, or adding up costs more than it gains."""
    blocks = tiles * -(-shape.rows // one.rows)
    return replace(one, splits=max(1, min(programs // blocks, shape.columns // (2 * one.columns), 8)))


def write_table(path: Path, measurements: Iterable[DenseMeasurement]) -> None:
    """The best of each shape and token count, one a line."""
    best: dict[tuple[DenseShape, int], DenseMeasurement] = {}
    for one in measurements:
        key = one.shape, one.tokens
        if key not in best or one.microseconds < best[key].microseconds:
            best[key] = one
    lines = [
        json.dumps(
            {
                "shape": asdict(one.shape),
                "tokens": one.tokens,
                "microseconds": round(one.microseconds, 1),
                "tiling": record_of(one.tiling),
            }
        )
        for one in best.values()
    ]
    path.write_text("[\n" + ",\n".join(sorted(lines)) + "\n]\n")


def read_table(path: Path) -> list[DenseMeasurement]:
    return [
        DenseMeasurement(
            DenseShape(**record["shape"]),
            record["tokens"],
            record["microseconds"],
            Tiling(**record["tiling"]),
        )
        for record in json.loads(path.read_text())
    ]


@cache
def _table() -> Mapping[DenseShape, tuple[DenseMeasurement, ...]]:
    found: dict[DenseShape, tuple[DenseMeasurement, ...]] = {}
    for one in read_table(TABLE):
        found[one.shape] = (*found.get(one.shape, ()), one)
    return found
