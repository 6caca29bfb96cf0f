"""What GGUF has of a model family: a table for its config, one for its tensors. Families fill them."""

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moebius_worker.checkpoint.gguf.keys import Keys, Value
from moebius_worker.checkpoint.gguf.order import Order

# Told by the config, or of no use here: the scales of activations, old files' precomputed rotations, and the
# encoders for pictures (v), sound (a) and what leads from them to the text model (mm).
_CONSUMED = re.compile(r"rope_freqs\.weight|.+\.input_scale|blk\.\d+\.attn_rot_embd|(v|a|mm)\..+")
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the model, made of one of GGUF's.

    `name` is Hugging Face's, without `.weight` or `.bias` where GGUF has those too, and relative to the
    layer. With `{expert}` in it, the GGUF tensor is the stack of all experts' tensors. `rows` and `columns`:
    where GGUF has another order. `values`: where it has other values, told by a function of an fp32 array.
    """

    name: str
    rows: Order | None = None
    columns: Order | None = None
    values: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """A matrix of the model that GGUF has in several tensors, `of`, all decoded to fp32 and joined.

    `make` gets the arrays. `shape` tells of the stored shapes that of the result.
    """

    name: str
    of: tuple[str, ...]
    make: Callable[..., np.ndarray]
    shape: Callable[..., tuple[int, ...]]


Parts = Part | tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Family:
    """`config` tells each key of `config.json`; `only`, which values other metadata keys may have, the first
    if they are not there; `unread`, which keys need not be read.

    `layer` and `top` map GGUF's names, in a layer and outside, with their suffix or, for `.weight` and
    `.bias` alike, without. `applies` tells families of one architecture apart.
    """

    architecture: str
    class_name: str
    model_type: str
    config: Mapping[str, Value]
    top: Mapping[str, Parts]
    layer: Mapping[str, Parts]
    joins: tuple[Join, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unread: Set[str] = frozenset()
    applies: Callable[[Keys], bool] = lambda keys: True


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor's full Hugging Face name, with `{expert}` if it is a stack, and how it is stored."""

    name: str
    part: Part


def left_out(name: str, num_layers: int) -> bool:
    """Whether the model has no place for the tensor on purpose, as for the layers that draft tokens (MTP)."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return bool(_CONSUMED.fullmatch(name)) or (
        match["layer"] is not None and int(match["layer"]) >= num_layers
    )


def named(family: Family, name: str) -> tuple[Named, ...]:
    """What of the model GGUF's tensor `name` holds; empty for a tensor that the family does not have."""
    match = _NAME.fullmatch(name)
    assert match is not None
    layer, rest = match["layer"], match["rest"]
    table, prefix = (family.top, "") if layer is None else (family.layer, f"model.layers.{layer}.")
    suffix = ""
    if rest not in table:
        rest, _, kind = rest.rpartition(".")
        if kind not in ("weight", "bias", "scale"):
            return ()
        suffix = f".{kind}"
    parts = table.get(rest, ())
    parts = parts if isinstance(parts, tuple) else (parts,)
    return tuple(Named(f"{prefix}{part.name}{suffix}", part) for part in parts)
