"""Tables of measured tilings: those that are shipped, and the user's own of the GPU that is here.

The user's is written by `moebius kernels tune`. It counts for the GPU and for the kernels that it was
measured with; whatever is wrong with it is said, and then it is as if there were none.
"""

import json
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from moebius_kernels.jit.cache import cache_root
from moebius_kernels.jit.sources import digest
from moebius_kernels.registry import Device
from moebius_kernels.triton.tiling import Measured, nearest
from moebius_kernels.tuning import tilings_folder, tilings_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# What tilings cut up: all that experts and dense products are computed with, but not what chooses for them.
_KERNELS = (
    "align.py",
    "decode.py",
    "decode_asm.py",
    "decode_words.py",
    "expand.py",
    "experts.py",
    "gemm.py",
    "grouped_gemm.py",
    "layouts.py",
    "linear.py",
    "targets.py",
    "tile_products.py",
    "tiling.py",
)

log = logging.getLogger(__name__)


class Entry(Measured, Protocol):
    @property
    def shape(self) -> Hashable: ...

    @property
    def microseconds(self) -> float: ...


D = TypeVar("D", bound="DataclassInstance")
E = TypeVar("E", bound=Entry)
Decode = Callable[[Mapping[str, Any]], E]
Record = Mapping[str, Any]
Table = Mapping[Hashable, Sequence[E]]


def by_shape(entries: Iterable[E]) -> Table[E]:
    found: dict[Hashable, tuple[E, ...]] = {}
    for one in entries:
        found[one.shape] = (*found.get(one.shape, ()), one)
    return found


def find(tables: Iterable[Table[E]], shape: Hashable, tokens: int) -> E | None:
    """What the first table that knows this shape and nearly so many tokens has for them."""
    for table in tables:
        if (found := nearest(table.get(shape, ()), tokens)) is not None:
            return found
    return None


def best(entries: Iterable[E]) -> list[E]:
    """Of each shape and token count the fastest."""
    found: dict[Hashable, E] = {}
    for one in entries:
        key = one.shape, one.tokens
        if key not in found or one.microseconds < found[key].microseconds:
            found[key] = one
    return list(found.values())


def replaced(entries: Iterable[E], entry: E) -> list[E]:
    """With `entry` instead of what its shape and token count had."""
    return [*(one for one in entries if (one.shape, one.tokens) != (entry.shape, entry.tokens)), entry]


def read_records(path: Path, decode: Decode[E]) -> list[E]:
    """Of a shipped table."""
    return [decode(record) for record in json.loads(path.read_text())]


def written(records: Iterable[Record]) -> str:
    """JSON with one record a line, in an order that is always the same."""
    return "[\n" + ",\n".join(sorted(map(json.dumps, records))) + "\n]"


def typed(value: D) -> D:
    """The data class, if its fields are of the types that it declares and its numbers are none but positive
    ones, or the default. Raises TypeError."""
    for field in fields(value):
        found = getattr(value, field.name)
        if type(found) is not field.type or (type(found) is int and found < 1 and found != field.default):
            raise TypeError(f"{field.name} is {found!r}")
    return value


def user_entries(section: str, decode: Decode[E]) -> list[E]:
    """What the user measured on the GPU that is here; nothing without one."""
    # Most have measured nothing, and to ask a GPU what it is takes long in a process that has not used it.
    if not tilings_folder(cache_root()).is_dir() or not torch.cuda.is_available():
        return []
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = Device("cuda", properties.name, (properties.major, properties.minor))
    return read_user_table(tilings_path(cache_root(), device), device, {section: decode})[section]


def read_user_table(path: Path, device: Device, decodes: Mapping[str, Decode[Any]]) -> dict[str, list[Any]]:
    """The entries of each section that is asked for. Empty if there is no such table, or none to be used."""
    try:
        found = json.loads(path.read_text())
        if (other := found["for"]) != _made_for(device):
            what = "kernels" if {**other, "kernels": ""} == {**_made_for(device), "kernels": ""} else "GPUs"
            raise ValueError(f"it was measured with other {what}")
        return {name: [decode(one) for one in found[name]] for name, decode in decodes.items()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning(
            "The tilings in %s are not used: %s: %s. `moebius kernels tune` measures them anew.",
            path, type(error).__name__, error,
        )  # fmt: skip
    return {name: [] for name in decodes}


def write_user_table(path: Path, device: Device, sections: Mapping[str, Iterable[Record]]) -> None:
    """Whole or not at all. Raises OSError."""
    parts = [f'"for": {json.dumps(_made_for(device))}']
    parts += [f'"{name}": {written(records)}' for name, records in sections.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text("{" + ",\n".join(parts) + "}\n")
    part.replace(path)


def _made_for(device: Device) -> dict[str, str]:
    here = Path(__file__).parent
    assert device.architecture is not None
    return {
        "gpu": device.name,
        "architecture": "{}.{}".format(*device.architecture),
        "kernels": digest({name: (here / name).read_bytes() for name in _KERNELS}),
    }
