"""What layers keep of the text before a step: pages of keys and values, and slots of linear states."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from moebius_kernels.device_plan import pinned
from moebius_kernels.kv_pages import KvFormat, KvPages, bytes_per_page
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.types import StateStep

# A linear-state layer's tensors by name, [slots, ...] each.
StateTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class KvSpec:
    """What an attention layer keeps of each position.

    `window`: how far back, itself included, a position sees; None: to the beginning. `values_in_keys`: the
    first `value_dim` numbers of a key are its value.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    values_in_keys: bool = False


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What a linear-state layer keeps of a text: tensors of these shapes; `dtypes`: if not the model's."""

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]


class CacheSpecs:
    """The specs of a model's layers, numbered in the order in which layers add them."""

    def __init__(self) -> None:
        self._specs: list[KvSpec | StateSpec] = []

    def add(self, spec: KvSpec | StateSpec) -> int:
        self._specs.append(spec)
        return len(self._specs) - 1

    def __iter__(self) -> Iterator[KvSpec | StateSpec]:
        return iter(self._specs)

    @property
    def kv(self) -> list[KvSpec]:
        return [spec for spec in self._specs if isinstance(spec, KvSpec)]

    @property
    def states(self) -> list[StateSpec]:
        return [spec for spec in self._specs if isinstance(spec, StateSpec)]

    @property
    def windows(self) -> set[int | None]:
        return {spec.window for spec in self.kv}

    @property
    def longest_window(self) -> int | None:
        """How far back the layers with a window see; None without such layers."""
        return max((spec.window for spec in self.kv if spec.window is not None), default=None)

    def page_bytes(self, page_size: int, format: KvFormat, dtype: torch.dtype, *, windowed: bool) -> int:
        """Of a page of all layers with a window, or of all those without."""
        return sum(
            bytes_per_page(
                format,
                page_size,
                spec.kv_heads,
                spec.key_dim,
                spec.value_dim,
                dtype,
                values_in_keys=spec.values_in_keys,
            )
            for spec in self.kv
            if (spec.window is not None) is windowed
        )

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Of a slot of all linear-state layers."""
        return sum(
            torch.Size(shape).numel() * spec.dtypes.get(name, dtype).itemsize
            for spec in self.states
            for name, shape in spec.shapes.items()
        )


@dataclass(frozen=True, slots=True)
class LayerCache:
    tensors: KvPages | StateTensors
    window: int | None


def allocate_caches(
    specs: CacheSpecs,
    layout: CacheLayout,
    *,
    format: KvFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache]:
    """The memory of each spec, zeroed."""
    caches: list[LayerCache] = []
    for spec in specs:
        if isinstance(spec, KvSpec):
            pages = layout.num_pages if spec.window is None else layout.num_window_pages
            tensors: KvPages | StateTensors = KvPages.allocate(
                format,
                pages,
                layout.page_size,
                spec.kv_heads,
                spec.key_dim,
                spec.value_dim,
                dtype,
                device,
                values_in_keys=spec.values_in_keys,
            )
            caches.append(LayerCache(tensors, spec.window))
        else:
            tensors = {
                name: torch.zeros(
                    (layout.state_slots, *shape), dtype=spec.dtypes.get(name, dtype), device=device
                )
                for name, shape in spec.shapes.items()
            }
            caches.append(LayerCache(tensors, None))
    return caches


def enter_states(caches: Sequence[LayerCache], steps: Sequence[tuple[StateStep, int]]) -> None:
    """Before a step: restores or zeroes the slots of requests; with each, the position at which it begins."""
    _copy_states(caches, [(step.restore, step.slot) for step, _ in steps if step.restore is not None])
    zeroed = [step.slot for step, start in steps if step.restore is None and start == 0]
    for tensor, slots in _with_slots(caches, zeroed):
        tensor.index_fill_(0, slots, 0)


def leave_states(caches: Sequence[LayerCache], steps: Sequence[StateStep]) -> None:
    """After a step: copies slots to the snapshots that are to be kept."""
    _copy_states(caches, [(step.slot, step.save) for step in steps if step.save is not None])


def _copy_states(caches: Sequence[LayerCache], pairs: Sequence[tuple[int, int]]) -> None:
    """From the first to the second of each."""
    for tensor, (sources, slots) in _with_slots(caches, [*zip(*pairs, strict=True)]):
        tensor.index_copy_(0, slots, tensor[sources])


def _with_slots(
    caches: Sequence[LayerCache], slots: Sequence[object]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each tensor of a state, and `slots`, int64, sent once and not waited for. Nothing if they are empty."""
    states = [cache.tensors for cache in caches if not isinstance(cache.tensors, KvPages)] if slots else []
    tensors = [tensor for state in states for tensor in state.values()]
    if tensors:
        device = tensors[0].device
        there = pinned(np.array(slots), device).to(device, non_blocking=True)
        yield from ((tensor, there) for tensor in tensors)
