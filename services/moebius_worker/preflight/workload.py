"""Steps without meaning, in caches that nobody uses yet: for trying kernels, and for warming them up."""

import random
from dataclasses import replace

import torch

from moebius_kernels.operations import Draw
from moebius_worker.engine.cache.layout import CacheLayout
from moebius_worker.engine.drawing import draws_of
from moebius_worker.engine.types import SampleRow, SamplingParams, Slice, StateStep
from moebius_worker.preflight.subject import ProbeStep

# Tokens that a request may have behind it, at most.
CONTEXT = 4096

# How requests may want to be sampled: batches without top-k and top-p, and batches with them. So hot that
# most draws would be others if nothing were cut off; the last keeps more tokens than are looked at first.
_BATCHES = (
    (
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=3.0, min_p=0.4),
    ),
    (
        SamplingParams(temperature=3.0, top_k=4, top_p=0.9),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=3.0, top_p=0.2, min_p=1e-4),
        SamplingParams(temperature=3.0, top_p=0.999),
    ),
)


class Workload:
    """Makes slices for the caches of `layout`. `max_model_len`: tokens of a request, at most. `longest`:
    requests have as many of them as they can, not up to CONTEXT."""

    def __init__(
        self, layout: CacheLayout, vocab_size: int, max_model_len: int, *, longest: bool = False
    ) -> None:
        self._layout, self._vocab_size, self._max_model_len = layout, vocab_size, max_model_len
        self._longest = longest
        self._random = random.Random(0)

    def slices(self, step: ProbeStep) -> list[Slice]:
        """The requests of a step; none if the caches are too small for it."""
        match step.kind:
            case "prefill":
                counts = [step.tokens]
            case "decode":
                counts = [1] * step.tokens
            case "mixed":
                counts = [1, 1, step.tokens - 2]
        if not self._fit(counts):
            return []
        return [self._slice(number, count) for number, count in enumerate(counts)]

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, draw_tokens: Draw) -> None:
        """Tokens of a step's logits, in each of the ways that there are."""
        for kinds in _BATCHES:
            rows = [
                SampleRow(replace(kinds[row % len(kinds)], seed=self._random.getrandbits(64)), (), range(row))
                for row in range(len(logits))
            ]
            draw_tokens(logits, draws_of(rows, logits.device))

    def _fit(self, counts: list[int]) -> bool:
        layout = self._layout
        pages = layout.num_pages
        if layout.window is not None:
            pages = min(pages, layout.num_window_pages)
        # The last request's own pages come after one of each of the others.
        needed = len(counts) - 1 + counts[-1] // layout.page_size + 2
        slots = layout.state_slots or len(counts)
        return needed <= pages and len(counts) <= slots and counts[-1] <= self._max_model_len

    def _slice(self, number: int, count: int) -> Slice:
        """Request `number`: it reads whatever pages, and writes to pages of its own."""
        layout, size = self._layout, self._layout.page_size
        start = min(self._past(), self._max_model_len - count)
        first, last = start // size, -(-(start + count) // size)
        own = range(number, number + last - first)
        window_pages: list[int] = []
        if layout.window is not None:
            oldest = layout.window_start(start)
            window_pages = [-1] * oldest + self._any(layout.num_window_pages, first - oldest) + [*own]
        return Slice(
            handle=number,
            token_ids=tuple(self._random.choices(range(self._vocab_size), k=count)),
            start=start,
            pages=(*self._any(layout.num_pages, first), *own),
            sample=True,
            window_pages=tuple(window_pages),
            state=StateStep(number) if layout.state_slots else None,
        )

    def _past(self) -> int:
        """How much text there is before a slice: nothing, a little, or much."""
        if self._longest:
            return self._max_model_len
        return self._random.choice((0, self._random.randrange(64), self._random.randrange(CONTEXT)))

    def _any(self, pages: int, count: int) -> list[int]:
        return [self._random.randrange(pages) for _ in range(count)]
