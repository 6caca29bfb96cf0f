"""The rows of a step that belong to prompts, as FlashInfer's batches describe them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moebius_kernels.attention_plan import Span


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Rows `first_row` to `last_row` (excluded) of a step, which are those of R requests.

    `row_starts` [R + 1] from `first_row` on; `page_starts` [R + 1]: where the pages of each are in `pages`;
    `last_page_lens` [R]: keys in the last page of each.
    """

    first_row: int
    last_row: int
    row_starts: tuple[int, ...]
    page_starts: tuple[int, ...]
    pages: tuple[int, ...]
    last_page_lens: tuple[int, ...]


def prompt_batch(spans: Sequence[Span], page_size: int, window: int | None) -> PromptBatch | None:
    """From the first request with several rows to the last; those with one row in between are part of it.

    Pages before the window of a request's first row are left out: what is masked depends on where keys end,
    not on where they begin. None if all have one row.
    """
    several = [index for index, span in enumerate(spans) if span.length > 1]
    if not several:
        return None
    starts = [0, *accumulate(span.length for span in spans)]
    first, last = several[0], several[-1] + 1
    tables: list[Sequence[int]] = []
    lens: list[int] = []
    for span in spans[first:last]:
        tables.append(span.pages[span.oldest(window) // page_size : -(-span.end // page_size)])
        lens.append((span.end - 1) % page_size + 1)
    return PromptBatch(
        starts[first],
        starts[last],
        tuple(start - starts[first] for start in starts[first : last + 1]),
        (0, *accumulate(map(len, tables))),
        tuple(page for table in tables for page in table),
        tuple(lens),
    )
