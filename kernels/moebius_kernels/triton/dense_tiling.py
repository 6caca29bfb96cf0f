"""Which tiling serves which dense product: by tables of measurements, and by rules for other shapes."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from moebius_kernels.formats.dense import Dense
from moebius_kernels.formats.format import Format
from moebius_kernels.triton.tiling import WIDE, Tiling, record_of
from moebius_kernels.triton.tiling_tables import (
    Table,
    best,
    by_shape,
    find,
    read_records,
    typed,
    user_entries,
    written,
)

TABLE = Path(__file__).parent / "tables" / "hopper_dense.json"
# Numbers of a matrix that is expanded. Larger ones are heads, which see few tokens.
_MOST_EXPANDED = 1 << 27


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


def by_library(tokens: int, format: Format, shape: tuple[int, ...]) -> bool:
    """Whether the library is faster, as measured on an H200."""
    rows, columns = shape
    if rows < 1024:
        return tokens > 256
    if isinstance(format, Dense):
        return tokens > 32
    return tokens > 128 and rows * columns <= _MOST_EXPANDED


def dense_tiling(tokens: int, shape: DenseShape) -> Tiling:
    found = find(_tables(), shape, tokens)
    return rules(tokens, shape) if found is None else found.tiling


def rules(tokens: int, shape: DenseShape) -> Tiling:
    """From what was measured on an H200."""
    wide = shape.code in WIDE
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
    path.write_text(written(map(record_of_measurement, best(measurements))) + "\n")


def read_table(path: Path) -> list[DenseMeasurement]:
    return read_records(path, measurement_of)


def measurement_of(record: Mapping[str, Any]) -> DenseMeasurement:
    """The inverse of `record_of_measurement`. Raises KeyError, TypeError or ValueError for anything else."""
    shape, tiling = typed(DenseShape(**record["shape"])), typed(Tiling(**record["tiling"]))
    return typed(DenseMeasurement(shape, record["tokens"], float(record["microseconds"]), tiling))


def record_of_measurement(one: DenseMeasurement) -> Mapping[str, Any]:
    return {
        "shape": asdict(one.shape),
        "tokens": one.tokens,
        "microseconds": round(one.microseconds, 1),
        "tiling": record_of(one.tiling),
    }


@cache
def _tables() -> tuple[Table[DenseMeasurement], ...]:
    """The user's own, and the one that is shipped."""
    return by_shape(user_entries("dense", measurement_of)), by_shape(read_table(TABLE))
