"""The simulated model: a runner that takes time, and a sampler that knows what comes next."""

import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moebius_worker.engine.faults import InjectedError
from moebius_worker.engine.grammar.matcher import MaskRow
from moebius_worker.engine.types import Logprobs, Sampled, SampleRow, Slice
from moebius_worker.sim.answer import answer_length, draw, word_at
from moebius_worker.sim.settings import SimFault, SimSettings
from moebius_worker.sim.vocabulary import Vocabulary

# Progress of a long step is told so often, in seconds.
_PIECE = 0.25


class Ends(Protocol):
    """How this engine's home lets it go wrong. None of them returns."""

    def die(self) -> None: ...

    def stall(self) -> None: ...

    def reset(self) -> None: ...


class SimModel:
    """`step` is the runner's, `sample` the sampler's: they share what was generated so far."""

    def __init__(self, settings: SimSettings, vocabulary: Vocabulary, ends: Ends) -> None:
        self._settings = settings
        self._words = vocabulary.words
        self._eos = vocabulary.eos_token_ids
        self._closing = vocabulary.closing
        self._ends = ends
        self._faults: list[SimFault] = sorted(settings.faults, key=lambda fault: fault.after_tokens)
        self._generated = 0

    def step(
        self, slices: Sequence[Slice], progress: Callable[[], None]
    ) -> tuple[NDArray[np.float32], Callable[[], frozenset[int]]]:
        """Takes as long as the settings say; the logits have no columns."""
        while self._faults and self._generated >= self._faults[0].after_tokens:
            self._act(self._faults.pop(0))
        prefill = sum(len(piece.token_ids) for piece in slices if len(piece.token_ids) > 1)
        seconds = self._settings.itl + prefill / self._settings.prefill_rate
        end = time.monotonic() + varied(seconds, self._settings.jitter)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _PIECE))
            progress()
        return np.zeros((sum(piece.sample for piece in slices), 0), dtype=np.float32), frozenset

    def sample(self, logits: NDArray[np.float32], rows: Sequence[SampleRow]) -> list[Sampled]:
        self._generated += len(rows)
        return [self._sampled(row) for row in rows]

    def _sampled(self, row: SampleRow) -> Sampled:
        token_id = self._within(row.allowed, row) if row.allowed is not None else self._free(row)
        count = row.params.logprobs
        if count is None:
            return Sampled(token_id, None)
        others = [word for word in self._words[: count + 1] if word != token_id]
        top = tuple((other, -0.5 - place) for place, other in enumerate([token_id, *others][:count]))
        return Sampled(token_id, Logprobs(-0.5, top))

    def _free(self, row: SampleRow) -> int:
        seed, position = row.params.seed, len(row.output_ids)
        length = answer_length(seed, self._settings.answer_tokens)
        if self._eos and position >= length and self._eos[0] not in row.banned:
            # A client that ignores it wants to hear more.
            ignored = position > length and row.output_ids[length] == self._eos[0]
            if not ignored:
                return self._eos[0]
        return word_at(seed, position, self._words)

    def _within(self, allowed: MaskRow, row: SampleRow) -> int:
        """Of what a grammar allows; every other time what would end a value, so that answers have an end."""
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
        number = draw(row.params.seed, len(row.output_ids), b"grammar")
        if number % 2:
            for token_id in (*self._eos, *self._closing):
                if bits[token_id]:
                    return token_id
        choices = np.flatnonzero(bits)
        return int(choices[number // 2 % len(choices)])

    def _act(self, fault: SimFault) -> None:
        match fault.action:
            case "die":
                self._ends.die()
            case "stall":
                self._ends.stall()
            case "reset":
                self._ends.reset()
            case "raise":
                raise InjectedError(f"a simulated fault after {fault.after_tokens} tokens")


def varied(seconds: float, jitter: float) -> float:
    return seconds * random.uniform(1 - jitter, 1 + jitter)
