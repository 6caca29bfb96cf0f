"""A model with one layer of each kind: what its layers need, without most of their weights."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import torch

from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.layer import Layer
from moebius_worker.engine.models.moe import ResidentExperts
from moebius_worker.engine.models.parameters import Matrix, Slots, Vector
from moebius_worker.engine.models.residual import Residual
from moebius_worker.engine.weights.load import Loading

# Attributes that layers of a kind differ in: the number of a layer's cache, and what it computes with.
_OWN = frozenset({"cache", "ops"})


class SkippedLayer:
    """Stands where a layer of a kind that is there already was."""

    def __call__(self, residual: Residual, context: StepContext, *rest: Any) -> Residual:
        return residual

    def slots(self, prefix: str) -> Slots:
        return {}


def keep_kinds(model: Decoder, loading: Loading) -> Loading:
    """Skips all layers of `model` but the first of each kind. Returns what is to be loaded of its `loading`,
    whose sizes have been allocated, since the forms of weights are part of a kind."""
    _skip_all_but_the_first_of_each(model)
    owners = {slot.owner for slot in model.slots().values()}
    return replace(
        loading,
        fills=[fill for fill in loading.fills if fill.slot.owner in owners],
        forms={matrix: forms for matrix, forms in loading.forms.items() if matrix in owners},
        vectors=[vector for vector in loading.vectors if vector in owners],
    )


@contextmanager
def only_kinds(model: Decoder) -> Iterator[None]:
    """Meanwhile `model` makes all calls that it always makes, but in a few layers: it computes nonsense."""
    layers = list(model.layers)
    _skip_all_but_the_first_of_each(model)
    try:
        yield
    finally:
        # A family may know the same list by another name.
        assert isinstance(model.layers, list)
        model.layers[:] = layers


def _skip_all_but_the_first_of_each(model: Decoder) -> None:
    layers = model.layers
    assert isinstance(layers, list)
    kinds: set[Hashable] = set()
    for index, layer in enumerate(layers):
        kind = kind_of(layer)
        if kind in kinds:
            layers[index] = SkippedLayer()
        kinds.add(kind)


def kind_of(value: Any) -> Hashable:
    """The same for layers that make the same calls. What it does not understand, it holds for all alike."""
    match value:
        case Matrix():
            forms = tuple(block.format for block in value.blocks)
            return tuple(value.parts.items()), value.columns, value.experts, forms
        case Vector():
            return value.shape, value.experts, value.dtype
        case str() | int() | float() | None | Enum() | torch.dtype():
            return value
        case Mapping():
            return tuple((name, kind_of(item)) for name, item in value.items())
        case list() | tuple():
            return tuple(map(kind_of, value))
        case partial():
            return kind_of(value.func), kind_of(value.args), kind_of(value.keywords)
        case FunctionType():
            return value.__module__, value.__qualname__
        case _ if is_dataclass(value):
            return repr(value)
        case Layer() | ResidentExperts():
            own = {name: item for name, item in vars(value).items() if name not in _OWN}
            return type(value).__qualname__, kind_of(own)
        case _:
            return type(value).__qualname__
