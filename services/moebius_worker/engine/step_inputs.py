"""From the slices of a step to what a model computes it with: tensors and plans on the device."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from moebius_kernels.attention_plan import Span, plan_attention
from moebius_kernels.device_plan import AttentionPlanner, DeviceStatePlan, pinned, plan_states_on_device
from moebius_kernels.state_plan import StatePlan, plan_states
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.layer_caches import CacheSpecs, LayerCache
from moebius_worker.engine.models.context import StepContext
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.types import Slice


class StepInputs(Protocol):
    def context(
        self, slices: Sequence[Slice], *, pad_to: int = 0, drawn: torch.Tensor | None = None
    ) -> StepContext:
        """In force until the next one is asked for. `pad_to`: a step of decodes is filled up to so many rows
        that do not exist. `drawn`: if the step is planned ahead, the ids int64 [N] on the device that were
        drawn in the step before. Raises ValueError for a token id that is not in the vocabulary."""
        ...


class _Rows(NamedTuple):
    """A step's, int64: of each its token and its position, and those whose logits are wanted."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    sampled: npt.NDArray[np.int64]


def _rows_of(slices: Sequence[Slice], vocab_size: int) -> _Rows:
    """Raises ValueError for a token id that is not in the vocabulary."""
    # The one look that the host takes at each token: the GPU waits meanwhile.
    token_ids = np.fromiter(chain.from_iterable(piece.token_ids for piece in slices), np.int64)
    if token_ids.max(initial=0) >= vocab_size:
        handle, largest = next(
            (piece.handle, largest) for piece in slices if (largest := max(piece.token_ids)) >= vocab_size
        )
        raise ValueError(
            f"request {handle} holds the token id {largest}; the vocabulary ends at {vocab_size - 1}"
        )
    lengths = np.array([len(piece.token_ids) for piece in slices], np.int64)
    ends = lengths.cumsum()
    # How far a slice's positions are from its rows.
    ahead = np.array([piece.start for piece in slices], np.int64) - ends + lengths
    return _Rows(
        token_ids,
        np.arange(len(token_ids)) + ahead.repeat(lengths),
        ends[np.array([piece.sample for piece in slices], bool)] - 1,
    )


def _spans(slices: Sequence[Slice], window: int | None) -> list[Span]:
    return [
        Span(piece.start, len(piece.token_ids), piece.pages if window is None else piece.window_pages)
        for piece in slices
    ]


def _slots(slices: Sequence[Slice]) -> list[int]:
    return [piece.state.slot for piece in slices if piece.state is not None]


class HostInputs:
    """For operations that read plans in Python: on a CPU."""

    def __init__(
        self,
        specs: CacheSpecs,
        caches: Sequence[LayerCache],
        layout: CacheLayout,
        place: Place,
        *,
        vocab_size: int,
    ) -> None:
        self._specs, self._caches, self._layout, self._place = specs, caches, layout, place
        self._vocab_size = vocab_size

    def context(
        self, slices: Sequence[Slice], *, pad_to: int = 0, drawn: torch.Tensor | None = None
    ) -> StepContext:
        assert pad_to == 0
        device = self._place.device
        token_ids, positions, sampled = map(torch.from_numpy, _rows_of(slices, self._vocab_size))
        if drawn is not None:
            token_ids = drawn[~token_ids]
        states: StatePlan | None = None
        if self._specs.states:
            states = plan_states(_spans(slices, None), _slots(slices), device)
        return StepContext(
            token_ids,
            positions,
            sampled,
            {
                window: plan_attention(
                    _spans(slices, window),
                    page_size=self._layout.page_size,
                    window=window,
                    dtype=self._place.dtype,
                    device=device,
                )
                for window in self._specs.windows
            },
            self._caches,
            states,
        )


class DeviceInputs:
    """For kernels, and for CUDA graphs: every step's inputs lie in the same memory, and get there by copies
    that nobody waits for."""

    def __init__(
        self,
        specs: CacheSpecs,
        caches: Sequence[LayerCache],
        layout: CacheLayout,
        place: Place,
        *,
        vocab_size: int,
        max_requests: int,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        self._specs, self._caches, self._device = specs, caches, place.device
        self._vocab_size = vocab_size
        self._planners = {
            window: AttentionPlanner(
                max_requests=max_requests,
                max_rows=max_rows,
                max_model_len=max_model_len,
                page_size=layout.page_size,
                window=window,
                device=place.device,
            )
            for window in specs.windows
        }
        # Token ids, positions, sampled rows: where they begin depends on how many rows there are, alone.
        self._rows = torch.zeros(2 * max_rows + max_requests, dtype=torch.int64, device=place.device)
        # Of decodes: whether a row does not exist, and the slot of its state.
        self.absent = torch.zeros(max_requests, dtype=torch.bool, device=place.device)
        self._slots = torch.zeros(max_requests, dtype=torch.int64, device=place.device)
        self._order = torch.arange(max_requests, device=place.device)
        # What `absent` says: so many rows exist, of so many.
        self._existing = (0, 0)

    def context(
        self, slices: Sequence[Slice], *, pad_to: int = 0, drawn: torch.Tensor | None = None
    ) -> StepContext:
        tokens, positions, sampled = _rows_of(slices, self._vocab_size)
        padding = np.zeros(max(0, pad_to - len(tokens)), np.int64)
        rows = len(tokens) + len(padding)
        sent = self._send(self._rows, np.concatenate((tokens, padding, positions, padding, sampled)))
        token_ids, places, chosen = sent.split([rows, rows, len(sampled)])
        if drawn is not None:
            taken = token_ids[: len(tokens)]
            torch.index_select(drawn, 0, ~taken, out=taken)
        if pad_to and self._existing != (len(tokens), rows):
            self._existing = len(tokens), rows
            self._send(self.absent, np.arange(rows) >= len(tokens))
        return StepContext(
            token_ids,
            places,
            chosen,
            {
                window: planner.plan(_spans(slices, window), pad_to=pad_to)
                for window, planner in self._planners.items()
            },
            self._caches,
            self._states(slices, rows, padded=pad_to > 0) if self._specs.states else None,
        )

    def _states(self, slices: Sequence[Slice], rows: int, *, padded: bool) -> StatePlan:
        slots = _slots(slices)
        if not padded:
            return plan_states_on_device(_spans(slices, None), slots, self._device)
        there = self._send(self._slots, np.array(slots + [-1] * (rows - len(slots))))
        nothing = torch.empty(0, 4, dtype=torch.int32, device=self._device)
        return DeviceStatePlan(self._order[:rows], there, (), nothing, nothing)

    def _send(self, destination: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
        """To the beginning of `destination`, which is returned."""
        return destination[: len(values)].copy_(pinned(values, self._device), non_blocking=True)
