"""From the slices of a step to what a model computes it with: tensors and plans on the device."""

from collections.abc import Sequence
from typing import Protocol

import torch

from moebius_kernels.attention_plan import Span, plan_attention
from moebius_kernels.device_plan import AttentionPlanner, DeviceStatePlan, plan_states_on_device
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
        drawn in the step before."""
        ...


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
        self, specs: CacheSpecs, caches: Sequence[LayerCache], layout: CacheLayout, place: Place
    ) -> None:
        self._specs, self._caches, self._layout, self._place = specs, caches, layout, place

    def context(
        self, slices: Sequence[Slice], *, pad_to: int = 0, drawn: torch.Tensor | None = None
    ) -> StepContext:
        assert pad_to == 0
        device = self._place.device
        token_ids = torch.tensor([token for piece in slices for token in piece.token_ids], device=device)
        if drawn is not None:
            token_ids = drawn[~token_ids]
        states: StatePlan | None = None
        if self._specs.states:
            states = plan_states(_spans(slices, None), _slots(slices), device)
        return StepContext(
            token_ids,
            torch.tensor([at for piece in slices for at in range(piece.start, piece.end)], device=device),
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
        max_requests: int,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        self._specs, self._caches, self._device = specs, caches, place.device
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
        # Token ids, and after them positions: where these begin depends on how many rows there are, alone.
        self._rows = torch.zeros(2 * max_rows, dtype=torch.int64, device=place.device)
        # Of decodes: whether a row does not exist, and the slot of its state.
        self.absent = torch.zeros(max_requests, dtype=torch.bool, device=place.device)
        self._slots = torch.zeros(max_requests, dtype=torch.int64, device=place.device)
        self._order = torch.arange(max_requests, device=place.device)
        # What `absent` says: so many rows exist, of so many.
        self._existing = (0, 0)

    def context(
        self, slices: Sequence[Slice], *, pad_to: int = 0, drawn: torch.Tensor | None = None
    ) -> StepContext:
        tokens = [token for piece in slices for token in piece.token_ids]
        positions = [at for piece in slices for at in range(piece.start, piece.end)]
        padding = [0] * max(0, pad_to - len(tokens))
        rows = len(tokens) + len(padding)
        self._send(self._rows[: 2 * rows], tokens + padding + positions + padding)
        if drawn is not None:
            taken = self._rows[: len(tokens)]
            torch.index_select(drawn, 0, ~taken, out=taken)
        if pad_to and self._existing != (len(tokens), rows):
            self._existing = len(tokens), rows
            self._send(self.absent[:rows], [False] * len(tokens) + [True] * len(padding))
        token_ids, places = self._rows[: 2 * rows].view(2, rows)
        return StepContext(
            token_ids,
            places,
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
        self._send(self._slots[:rows], slots + [-1] * (rows - len(slots)))
        nothing = torch.empty(0, 4, dtype=torch.int32, device=self._device)
        return DeviceStatePlan(self._order[:rows], self._slots[:rows], (), nothing, nothing)

    def _send(self, destination: torch.Tensor, values: Sequence[object]) -> None:
        pinned = torch.tensor(values, dtype=destination.dtype)
        if self._device.type == "cuda":
            pinned = pinned.pin_memory()
        destination.copy_(pinned, non_blocking=True)
