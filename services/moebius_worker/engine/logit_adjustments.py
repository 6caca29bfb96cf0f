"""Penalties, biases and bans: what changes logits before a token is chosen."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from moebius_worker.engine.types import SampleRow


class _Entries:
    """Values for single logits, gathered over the rows of a batch."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.token_ids: list[int] = []
        self.values: list[float] = []

    def add(self, row: int, token_id: int, value: float) -> None:
        self.rows.append(row)
        self.token_ids.append(token_id)
        self.values.append(value)

    def place(self, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        index = (torch.tensor(self.rows, device=device), torch.tensor(self.token_ids, device=device))
        return index, torch.tensor(self.values, device=device)


def adjust_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Repetition penalty; then presence and frequency penalty and bias; then bans. fp32 [N, vocab].

    `logits` is not changed, but may be what is returned. Ids beyond the vocabulary are passed over: they
    cannot be drawn anyway.
    """
    vocab_size = logits.shape[1]
    factors, terms, bans = _Entries(), _Entries(), _Entries()
    for index, row in enumerate(rows):
        if row.plain:
            continue
        params = row.params
        if params.repetition_penalty != 1:
            for token_id in {*row.prompt_ids, *row.output_ids}:
                factors.add(index, token_id, params.repetition_penalty)
        for token_id, term in _terms(row).items():
            if token_id < vocab_size:
                terms.add(index, token_id, term)
        for token_id in row.banned:
            if token_id < vocab_size:
                bans.add(index, token_id, float("-inf"))
    if not (factors.rows or terms.rows or bans.rows):
        return logits
    logits = logits.clone()
    if factors.rows:
        place, factor = factors.place(logits.device)
        value = logits[place]
        logits[place] = torch.where(value > 0, value / factor, value * factor)
    if terms.rows:
        place, term_values = terms.place(logits.device)
        logits[place] += term_values
    if bans.rows:
        place, minus_infinity = bans.place(logits.device)
        logits[place] = minus_infinity
    return logits


def _terms(row: SampleRow) -> dict[int, float]:
    """What is added to the logit of each token."""
    params = row.params
    terms: defaultdict[int, float] = defaultdict(float, params.logit_bias)
    if params.presence_penalty or params.frequency_penalty:
        for token_id, count in Counter(row.output_ids).items():
            terms[token_id] -= params.presence_penalty + params.frequency_penalty * count
    return terms
