"""Which tiling serves which dense product: by a table of measurements, and by rules for other shapes."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from moebius_kernels.triton.tiling import Tiling, nearest, record_of

TABLE = Path(__file__).parent / "tables" / "hopper_dense.json"
# Programs that keep an H100's 132 multiprocessors busy: four on each.
_PROGRAMS = 528
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
    wide = shape.code in _WIDE
    if tokens <= 32:
        tile = 8 if tokens <= 8 else 16 if tokens <= 16 else 32
        step = 128 if wide or tile == 32 else 256
        one = Tiling(tile, 64, step, 4, 4 if wide else 3) if tile == 8 else Tiling(tile, 32, step, 2, 3)
        programs = -(-shape.rows // one.rows)
        # At least two steps each, or adding up costs more than it gains.
        splits = max(1, min(_PROGRAMS // programs, shape.columns // (2 * step), 16))
        return replace(one, splits=splits)
    if tokens <= 128:
        splits = max(1, min(264 // (-(-shape.rows // 64) * -(-tokens // 64)), shape.columns // 512, 8))
        return Tiling(64, 64, 64, 4, 4, splits=splits)
    return Tiling(128, 128, 64, 8, 3)


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
