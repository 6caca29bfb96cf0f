"""Which tiling serves which call: by tables of measurements, and by rules for shapes that are not in them.

Both look at numbers only: tokens, experts, widths and forms, never at what the tokens are for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moebius_kernels.triton.tiling import WIDE, ExpertTiling, Tiling, record_of
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

TABLE = Path(__file__).parent / "tables" / "hopper.json"
# The code of products by `fp8_gemm.py`.
FP8_BY_FP8 = "e4m3 by e4m3"


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """`gate_up` and `down`: the codes of their layouts."""

    gate_up: str
    down: str
    experts: int
    top_k: int
    hidden: int
    inner: int


@dataclass(frozen=True, slots=True)
class Measurement:
    shape: ExpertShape
    tokens: int
    microseconds: float
    tiling: ExpertTiling


def expert_tiling(tokens: int, shape: ExpertShape) -> ExpertTiling:
    found = find(_tables(), shape, tokens)
    return rules(tokens, shape) if found is None else found.tiling


def rules(tokens: int, shape: ExpertShape) -> ExpertTiling:
    """From what was measured on an H200. Tiles are about as high as an expert has tokens."""
    expected = tokens * shape.top_k / shape.experts
    if shape.gate_up == FP8_BY_FP8:
        return _rounded(expected)
    if tokens == 1:
        return ExpertTiling(_one_token(shape.gate_up), _one_token_down(shape.down))
    if expected <= 5:
        return ExpertTiling(
            _eight(shape.gate_up, shape.hidden, gated=True), _eight(shape.down, shape.inner, gated=False)
        )
    if shape.gate_up.endswith("_words") and shape.down.endswith("_words") and expected <= 40:
        tile = Tiling(16, 64, 256, 4, 3) if expected <= 12 else Tiling(32, 64, 128, 4, 3)
        return ExpertTiling(tile, tile)
    if expected <= 12:
        return ExpertTiling(_sixteen(shape.gate_up), _sixteen(shape.down))
    if expected <= 64:
        return ExpertTiling(Tiling(64, 64, 64, 4, 4), Tiling(64, 128, 64, 4, 4))
    down = Tiling(128, 128, 64, 8, 3)
    if shape.gate_up == "bf16":
        return ExpertTiling(Tiling(128, 128, 64, 8, 4), down)
    return ExpertTiling(Tiling(128, 64, 128, 4, 2), down)


def _rounded(expected: float) -> ExpertTiling:
    """Steps are the 128 columns that have a factor; tiles of down with 256 rows are two products."""
    if expected <= 32:
        return ExpertTiling(Tiling(64, 128, 128, 4, 2), Tiling(64, 256, 128, 4, 2))
    return ExpertTiling(Tiling(128, 128, 128, 8, 4), Tiling(128, 256, 128, 8, 4))


def _one_token(code: str) -> Tiling:
    # So few rows that warps have to share their columns, or there would not be enough warps.
    return Tiling(8, 16, 256, 2, 3 if code in WIDE else 4, depth=2)


def _one_token_down(code: str) -> Tiling:
    return Tiling(8, 64, 128, 4, 3) if code in WIDE else Tiling(8, 32, 256, 2, 3, prefetch=True)


def _eight(code: str, columns: int, gated: bool) -> Tiling:
    if code == "bf16":
        return Tiling(8, 16, 128, 1, 5) if gated else Tiling(8, 32, 128, 2, 4)
    if code in WIDE:
        return Tiling(8, 64, 128, 4, 3)
    # Of 640 columns three steps of 256 leave a sixth without work. What 704 and 1,408 leave costs nothing.
    idle = -columns % 256
    return Tiling(8, 64, 128, 4, 4) if idle > columns / 10 else Tiling(8, 64, 256, 4, 3)


def _sixteen(code: str) -> Tiling:
    if code == "bf16":
        return Tiling(16, 64, 128, 4, 3)
    return Tiling(16, 64, 128 if code in WIDE else 256, 4, 3, parts=2)


def write_table(path: Path, measurements: Iterable[Measurement]) -> None:
    """The best of each shape and token count, one a line."""
    path.write_text(written(map(record_of_measurement, best(measurements))) + "\n")


def read_table(path: Path) -> list[Measurement]:
    return read_records(path, measurement_of)


def measurement_of(record: Mapping[str, Any]) -> Measurement:
    """The inverse of `record_of_measurement`. Raises KeyError, TypeError or ValueError for anything else."""
    gate_up, down = (typed(Tiling(**record[name])) for name in ("gate_up", "down"))
    shape = typed(ExpertShape(**record["shape"]))
    time = float(record["microseconds"])
    return typed(Measurement(shape, record["tokens"], time, ExpertTiling(gate_up, down)))


def record_of_measurement(one: Measurement) -> Mapping[str, Any]:
    return {
        "shape": asdict(one.shape),
        "tokens": one.tokens,
        "microseconds": round(one.microseconds, 1),
        "gate_up": record_of(one.tiling.gate_up),
        "down": record_of(one.tiling.down),
    }


@cache
def _tables() -> tuple[Table[Measurement], ...]:
    """The user's own, and the one that is shipped."""
    return by_shape(user_entries("experts", measurement_of)), by_shape(read_table(TABLE))
