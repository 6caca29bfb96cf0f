"""Tilings that users measure: of which products, and where they are kept."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius_kernels.formats.format import Format
from moebius_kernels.jit.sources import digest
from moebius_kernels.registry import Device, declared


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """A layer of routed experts, its matrices in the forms that kernels read."""

    gate_up: Format
    down: Format
    experts: int
    top_k: int
    hidden: int
    inner: int


@dataclass(frozen=True, slots=True)
class DenseProduct:
    """A dense layer's matrix of `rows` by `columns`, in the form that kernels read."""

    format: Format
    rows: int
    columns: int


Product = ExpertProduct | DenseProduct


@dataclass(frozen=True, slots=True)
class Point:
    """A product with so many tokens. `title` names the product. `candidates`: about how many tilings are
    tried; 0 for a `reason`."""

    product: Product
    title: str
    tokens: int
    candidates: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Compiling:
    """So many of the kernels that will be tried have been compiled."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Trying:
    """Candidate `number` of a point is measured. `best`: microseconds of the best so far, None before one."""

    point: Point
    number: int
    best: float | None


@dataclass(frozen=True, slots=True)
class Dropped:
    """A candidate that will not be used, and why."""

    point: Point
    tiling: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best tiling of a point, in microseconds; None: none works. `usual`: of what was used until now."""

    point: Point
    tiling: str
    microseconds: float | None
    usual: float | None


Report = Callable[[Compiling | Trying | Dropped | Tuned], None]


@dataclass(frozen=True, slots=True)
class Tuner:
    """`points`: what there is to measure of products with so many tokens; needs no GPU. `tune`: measures
    points on the GPU that is here, and keeps what is best in the table at a path, point by point."""

    points: Callable[[Sequence[Product], Sequence[int]], list[Point]]
    tune: Callable[[Sequence[Point], Device, Path, Report], None]


def find_tuner() -> Tuner:
    """Of the kernels that have tilings. Raises LookupError where these are not installed."""
    for tuner in declared("TUNERS"):
        if isinstance(tuner, Tuner):
            return tuner
    raise LookupError("the kernels that have tilings are not installed")


def tilings_folder(root: Path) -> Path:
    """Where below `root` all tilings are that users measured."""
    return root / "tilings"


def tilings_path(root: Path, device: Device) -> Path:
    """Where below `root` the tilings are that were measured on such a GPU. Raises ValueError for a CPU."""
    if device.architecture is None:
        raise ValueError(f"tilings are of GPUs, and {device.name} is none")
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-")
    major, minor = device.architecture
    return tilings_folder(root) / f"{name}-sm{major}{minor}.json"


def tilings_digest(root: Path, device: Device) -> str:
    """Of what users measured for this device; another one whenever that is measured again."""
    try:
        return digest({"table": tilings_path(root, device).read_bytes()})
    except (OSError, ValueError):
        return ""
