"""Which rows of a step attend to which pages: found once a step, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Keys that the rows of one decode group may gather together, padding included. It bounds the memory that
# a layer's attention needs for its copy of keys and values.
MAX_GROUP_KEYS = 65536


# One for each request and step: named tuples are made in half the time that frozen data classes are.
class Span(NamedTuple):
    """The rows of one request: positions `start` to `start + length`, whose block table is `pages`."""

    start: int
    length: int
    pages: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.length

    def oldest(self, window: int | None) -> int:
        """The first position that its first row sees; None for `window` means all."""
        return 0 if window is None else max(0, self.start - window + 1)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Requests with one row each, of similar context length, that are computed together.

    `rows` int64 [B]; `pages` int64 [B * P], padded with page 0; `num_keys` of each row's P * page_size are
    looked at; `mask` [B, 1, 1, num_keys] is added to the scores, None if every row sees all of them.
    """

    rows: torch.Tensor
    pages: torch.Tensor
    num_keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Several rows of one request, `first_row` to `last_row` (excluded).

    `pages` int64 [P]; row i sees the keys to `num_keys - rows + i`, the last `window` of them if that is not
    None. `mask` [rows, num_keys] says the same and is added to the scores; None if row i sees keys 0 to i.
    """

    first_row: int
    last_row: int
    pages: torch.Tensor
    num_keys: int
    window: int | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`slots` int64 [T]: where each row's key and value go, page * page_size + offset. `window`: as planned
    for, None for all."""

    slots: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    window: int | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """A decoding request: its row, and the keys it sees, counted from the start of its first page."""

    row: int
    pages: Sequence[int]
    first_key: int
    num_keys: int


def plan_attention(
    spans: Sequence[Span], *, page_size: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> AttentionPlan:
    """Plans a step whose rows are those of `spans`, one after another.

    `window`: a position sees itself and the `window - 1` before it; None means all. `dtype` is that of the
    queries. Pages before the window of a span's first row are neither read nor written; their numbers may
    be -1.
    """
    slots: list[int] = []
    decoding: list[_Row] = []
    chunks: list[Chunk] = []
    for span in spans:
        row = len(slots)
        slots += (
            span.pages[position // page_size] * page_size + position % page_size
            for position in range(span.start, span.end)
        )
        oldest = span.oldest(window)
        first_page = oldest // page_size
        base = first_page * page_size
        pages = span.pages[first_page : -(-span.end // page_size)]
        if span.length == 1:
            decoding.append(_Row(row, pages, oldest - base, span.end - base))
        else:
            mask = None
            if span.start > 0 or (window is not None and span.length > window):
                mask = causal_mask(span.start - base, span.length, span.end - base, window, dtype, device)
            pages_tensor = torch.tensor(pages, device=device)
            chunks.append(Chunk(row, row + span.length, pages_tensor, span.end - base, window, mask))
    groups = tuple(_decode_group(rows, page_size, dtype, device) for rows in _similar(decoding))
    return AttentionPlan(torch.tensor(slots, device=device), groups, tuple(chunks), window)


def _similar(rows: Sequence[_Row]) -> list[list[_Row]]:
    """Groups whose longest row is at most twice the shortest, so that padding at most doubles the work."""
    groups: list[list[_Row]] = []
    for row in sorted(rows, key=lambda row: row.num_keys, reverse=True):
        if groups:
            longest = groups[-1][0].num_keys
            if row.num_keys * 2 >= longest and (len(groups[-1]) + 1) * longest <= MAX_GROUP_KEYS:
                groups[-1].append(row)
                continue
        groups.append([row])
    return groups


def _decode_group(
    rows: Sequence[_Row], page_size: int, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    num_keys = rows[0].num_keys
    num_pages = len(rows[0].pages)
    pages = [page for row in rows for page in (*row.pages, *[0] * (num_pages - len(row.pages)))]
    mask = None
    if any(row.first_key > 0 or row.num_keys < num_keys for row in rows):
        first = torch.tensor([row.first_key for row in rows], device=device).unsqueeze(1)
        last = torch.tensor([row.num_keys for row in rows], device=device).unsqueeze(1)
        key = torch.arange(num_keys, device=device)
        mask = additive_mask((key >= first) & (key < last), dtype)[:, None, None, :]
    return DecodeGroup(
        torch.tensor([row.row for row in rows], device=device),
        torch.tensor(pages, device=device),
        num_keys,
        mask,
    )


def causal_mask(
    start: int, length: int, num_keys: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[length, num_keys], 0 or -inf: what rows at the keys `start`, `start + 1`, ... see."""
    position = torch.arange(start, start + length, device=device).unsqueeze(1)
    key = torch.arange(num_keys, device=device)
    visible = key <= position
    if window is not None:
        visible &= key > position - window
    return additive_mask(visible, dtype)


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, -inf elsewhere: attention turns a Boolean mask into this one, but in every layer."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))
