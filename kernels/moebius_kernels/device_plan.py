"""Plans of a step as tensors with fixed addresses: what kernels read, and a CUDA graph can replay."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moebius_kernels.attention_plan import AttentionPlan, Span, plan_attention
from moebius_kernels.state_plan import StatePlan, plan_states

# Rows of a request that are planned as one tile; a kernel may take a part of a tile at a time.
TILE_ROWS = 128
# Tokens of a chunk of linear attention.
CHUNK_ROWS = 64
# Counters of a request: as many query heads may a layer have.
MAX_HEADS = 256


@dataclass(frozen=True, slots=True)
class DeviceAttentionPlan:
    """What `AttentionPlan` says, for kernels. All tensors but `arrivals` are int32.

    B requests, of which the first `num_decodes` have one row each. Of a request: its first row, how many it
    has, and the number of keys that its last row sees when it sees all, 0 for padding; these belong to the
    positions 0, 1, ..., whose pages are its row of `block_tables` [B, P] (before a window anything).
    `slots` [T]: where each row's key and value go, page * page_size + offset; -1: nowhere. `tiles` [N, 2]:
    of the requests with several rows, the request and the first row, counted within it, of up to TILE_ROWS;
    tiles that see many keys first. `window` as of `AttentionPlan`. `arrivals` [B, MAX_HEADS]: zero whenever
    no attention is under way. `spans`: those that exist, in the order of their rows, for what plans on the
    host.
    """

    num_decodes: int
    first_rows: torch.Tensor
    num_rows: torch.Tensor
    num_keys: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    tiles: torch.Tensor
    arrivals: torch.Tensor
    page_size: int
    window: int | None = None
    spans: tuple[Span, ...] = ()

    def expanded(self, dtype: torch.dtype) -> AttentionPlan:
        """For the reference. Waits for the device; there must be no padding."""
        columns = (self.first_rows, self.num_rows, self.num_keys, self.block_tables)
        requests = sorted(zip(*(column.tolist() for column in columns), strict=True))
        spans = [Span(keys - rows, rows, pages) for _, rows, keys, pages in requests]
        device = self.slots.device
        return plan_attention(spans, page_size=self.page_size, window=self.window, dtype=dtype, device=device)


class AttentionPlanner:
    """Makes the plans of one step after another for the layers with one window, in the same memory.

    Block tables stay on the device from step to step: only what is new in them is sent.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_rows: int,
        max_model_len: int,
        page_size: int,
        window: int | None,
        device: torch.device,
    ) -> None:
        self._page_size, self._window, self._device = page_size, window, device
        self._max_requests, self._max_rows = max_requests, max_rows
        pages = -(-max_model_len // page_size)
        self._tables = torch.zeros(max_requests, pages, dtype=torch.int32, device=device)
        # What is in each row of the tables.
        self._written: list[tuple[int, ...]] = [()] * max_requests
        # A tile for each TILE_ROWS rows, and one more for each request.
        tiles = max_rows // TILE_ROWS + max_requests
        self._numbers = torch.zeros(3 * max_requests + max_rows + 2 * tiles, dtype=torch.int32, device=device)
        self._arrivals = torch.zeros(max_requests, MAX_HEADS, dtype=torch.int32, device=device)

    def plan(self, spans: Sequence[Span], *, pad_to: int = 0) -> DeviceAttentionPlan:
        """A step whose rows are those of `spans`, one after another. It is in force until the next plan.

        `pad_to`: if all spans have one row, rows and requests are filled up to so many that do not exist.
        """
        starts = np.cumsum([0, *(span.length for span in spans)])
        several = [span.length > 1 for span in spans]
        order = sorted(range(len(spans)), key=several.__getitem__)
        num_decodes = len(spans) - sum(several)
        num_requests, num_rows = max(len(spans), pad_to), max(int(starts[-1]), pad_to)
        requests, rows = self._max_requests, self._max_rows
        assert num_requests <= requests
        assert num_rows <= rows
        assert pad_to == 0 or num_decodes == len(spans)

        numbers = np.empty(len(self._numbers), np.int32)
        first_rows, lengths, num_keys = numbers[: 3 * requests].reshape(3, requests)[:, :num_requests]
        slots = numbers[3 * requests :][:num_rows]
        size = self._page_size
        ordered = [spans[index] for index in order]
        # Whole columns at a time: this stands between a step and the next.
        first_rows[len(spans) :] = np.arange(len(spans), num_requests)
        first_rows[: len(spans)] = starts[order]
        lengths[:], num_keys[:], slots[:] = 1, 0, -1
        num_keys[: len(spans)] = [span.start + span.length for span in ordered]
        slots[first_rows[:num_decodes]] = [
            span.pages[span.start // size] * size + span.start % size for span in ordered[:num_decodes]
        ]
        for span, first in zip(ordered[num_decodes:], first_rows[num_decodes : len(spans)], strict=True):
            slots[first : first + span.length] = self._slots(span)
        lengths[num_decodes : len(spans)] = [span.length for span in ordered[num_decodes:]]
        tiles = _tiles(ordered, num_decodes)
        written = self._written
        changes = [
            self._changes(request, span)
            for request, span in enumerate(ordered)
            # From one step to the next most requests have the same object.
            if span.pages is not written[request]
        ]
        used = 3 * requests + (rows + 2 * len(tiles) if tiles else num_rows)
        numbers[3 * requests + rows :][: 2 * len(tiles)] = [part for tile in tiles for part in tile]
        self._numbers[:used].copy_(pinned(numbers[:used], self._device), non_blocking=True)
        self._send(changes)

        first, rows_of, keys_of = self._numbers[: 3 * requests].view(3, requests)[:, :num_requests]
        return DeviceAttentionPlan(
            num_decodes=num_requests if pad_to else num_decodes,
            first_rows=first,
            num_rows=rows_of,
            num_keys=keys_of,
            block_tables=self._tables[:num_requests],
            slots=self._numbers[3 * requests :][:num_rows],
            tiles=self._numbers[3 * requests + rows :][: 2 * len(tiles)].view(-1, 2),
            arrivals=self._arrivals[:num_requests],
            page_size=self._page_size,
            window=self._window,
            spans=tuple(spans),
        )

    def _slots(self, span: Span) -> np.ndarray:
        """Of several rows."""
        size = self._page_size
        first, offset = divmod(span.start, size)
        pages = np.array(span.pages[first : -(-span.end // size)])
        return (pages[:, None] * size + np.arange(size)).ravel()[offset : offset + span.length]

    def _changes(self, request: int, span: Span) -> tuple[int, tuple[int, ...]]:
        """Where in the flat tables something new begins, and the pages from there on."""
        first = span.oldest(self._window) // self._page_size
        pages, before = tuple(span.pages), self._written[request]
        known = min(len(before), len(pages))
        new = max(first, known) if before[first:known] == pages[first:known] else first
        self._written[request] = pages
        return request * self._tables.shape[1] + new, pages[new:]

    def _send(self, changes: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        count = sum(len(pages) for _, pages in changes)
        if count == 0:
            return
        host = np.empty((2, count), np.int32)
        places, numbers = host
        at = 0
        for place, pages in changes:
            if pages:
                end = at + len(pages)
                places[at:end] = np.arange(place, place + len(pages))
                numbers[at:end] = pages
                at = end
        where, what = pinned(host, self._device).to(self._device, non_blocking=True)
        self._tables.view(-1).index_copy_(0, where.long(), what)


def _tiles(spans: Sequence[Span], first_request: int) -> list[tuple[int, int]]:
    """Request and first row of each tile, those that see many keys first."""
    tiles = [
        (span.start + row, request, row)
        for request, span in enumerate(spans[first_request:], first_request)
        for row in range(0, span.length, TILE_ROWS)
    ]
    return [(request, row) for _, request, row in sorted(tiles, reverse=True)]


@dataclass(frozen=True, slots=True)
class DeviceStatePlan(StatePlan):
    """A `StatePlan` that kernels can read; its `slots` may be -1, for padding.

    `spans` int32 [S, 4]: of each segment the first row, the row after its last, the slot, the first chunk.
    `chunks` int32 [N, 4]: of each chunk of up to CHUNK_ROWS rows, its first row and the row after its last,
    the first row of its segment, and the slot.
    """

    spans: torch.Tensor
    chunks: torch.Tensor


def plan_states_on_device(
    spans: Sequence[Span], slots: Sequence[int], device: torch.device
) -> DeviceStatePlan:
    """As `plan_states`."""
    plan = plan_states(spans, slots, torch.device("cpu"))
    table: list[tuple[int, int, int, int]] = []
    chunks: list[tuple[int, int, int, int]] = []
    for segment in plan.segments:
        table.append((segment.first_row, segment.last_row, segment.slot, len(chunks)))
        for first in range(segment.first_row, segment.last_row, CHUNK_ROWS):
            last = min(first + CHUNK_ROWS, segment.last_row)
            chunks.append((first, last, segment.first_row, segment.slot))
    decodes = len(plan.rows)
    # One copy for all, in which everything begins at a multiple of 16 bytes, as kernels are compiled for.
    columns = np.zeros((2, decodes + decodes % 2), np.int64)
    columns[:, :decodes] = plan.rows, plan.slots
    parts = [columns.view(np.int32), np.array(table, np.int32), np.array(chunks, np.int32)]
    whole = pinned(np.concatenate([part.ravel() for part in parts]), device).to(device, non_blocking=True)
    columns_there, table_there, chunks_there = whole.split([part.size for part in parts])
    rows_there, slots_there = columns_there.view(torch.int64).view(2, -1)[:, :decodes]
    return DeviceStatePlan(
        rows_there, slots_there, plan.segments, table_there.view(-1, 4), chunks_there.view(-1, 4)
    )


def pinned(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """On the host, from where a copy to the device need not be waited for. PyTorch hands the memory out again
    when that is done."""
    host = torch.from_numpy(values)
    return torch.empty_like(host, pin_memory=True).copy_(host) if device.type == "cuda" else host
