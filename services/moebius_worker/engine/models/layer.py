"""What all layers are: things with parameters, which compute with the operations that they are bound to."""

from collections.abc import Iterable, Iterator
from typing import ClassVar

from moebius_kernels.operations import REFERENCE, Operations


class Layer:
    """Computes with the references until it, or what it is part of, is bound to other operations."""

    # Whether it asks the host for something in the midst of a step, which no CUDA graph can hold.
    ASKS_HOST: ClassVar[bool] = False

    ops: Operations = REFERENCE

    def bind(self, ops: Operations) -> None:
        """Makes it, and all layers that it is made of, compute with `ops`."""
        self.ops = ops
        for layer in layers_in(vars(self).values()):
            layer.bind(ops)


def asks_host(layer: Layer) -> bool:
    """Whether it, or a layer that it is made of, does so."""
    return layer.ASKS_HOST or any(map(asks_host, layers_in(vars(layer).values())))


def layers_in(values: Iterable[object]) -> Iterator[Layer]:
    """The layers among `values`, and in the lists, tuples and dictionaries among them."""
    for value in values:
        if isinstance(value, Layer):
            yield value
        elif isinstance(value, list | tuple):
            yield from layers_in(value)
        elif isinstance(value, dict):
            yield from layers_in(value.values())
