"""The orders of rows and columns that llama.cpp's converter changes, and values that it computes; undone.

Source: llama.cpp's conversion/*.py (`modify_tensors` of each model).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# Of a model's config and a number of rows (or columns): which of the stored make the wanted, in turn.
Order = Callable[[Mapping[str, Any], int], np.ndarray]


class OrderError(ValueError):
    """The rows are not those of the config's heads."""


def rotary(heads_key: str) -> Order:
    """Llama's q and k: each head's pairs of rotary embedding lie together, and go back to its two halves."""

    def order(config: Mapping[str, Any], count: int) -> np.ndarray:
        heads = config[heads_key]
        if count % (2 * heads):
            raise OrderError(f"its {count} rows are no {heads} heads")
        return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    return order


def part(index: int, *sizes: Callable[[Mapping[str, Any]], int], then: Order | None = None) -> Order:
    """The rows of one of several matrices that lie one after another; `then` is their own order."""

    def order(config: Mapping[str, Any], count: int) -> np.ndarray:
        lengths = [size(config) for size in sizes]
        if sum(lengths) != count:
            raise OrderError(f"its {count} rows are no {' + '.join(map(str, lengths))}")
        start = sum(lengths[:index])
        within = np.arange(lengths[index]) if then is None else then(config, lengths[index])
        return start + within

    return order


def half(index: int) -> Order:
    """The first or the second half of the rows."""

    def order(config: Mapping[str, Any], count: int) -> np.ndarray:
        if count % 2:
            raise OrderError(f"its {count} rows are no two halves")
        return np.arange(count // 2) + index * (count // 2)

    return order


def value_heads(size_key: str | None = None, *, after_keys: bool = False) -> Order:
    """Linear attention's value heads: from one of each key head in turn to all of a key head together.

    `size_key`: the config's key of a head's size, None for one row a head. `after_keys`: q and k come first.
    """

    def order(config: Mapping[str, Any], count: int) -> np.ndarray:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        size = 1 if size_key is None else config[size_key]
        first = 2 * keys * config["linear_key_head_dim"] if after_keys else 0
        if values % keys or count != first + values * size:
            raise OrderError(f"its {count} are no {first} and {values} heads of {size}")
        tiled = np.arange(first, count).reshape(values // keys, keys, size)
        return np.concatenate([np.arange(first), tiled.swapaxes(0, 1).reshape(-1)])

    return order


def minus_one(array: np.ndarray) -> np.ndarray:
    """Norms whose weight counts from zero are stored with the one that is added to it."""
    return array - 1


def log_of_negative(array: np.ndarray) -> np.ndarray:
    """A_log is stored as -exp(A_log)."""
    return np.log(-array)


def one_channel(array: np.ndarray) -> np.ndarray:
    """A depthwise convolution [C, K] as torch has it, [C, 1, K]."""
    return array[:, None, :]
