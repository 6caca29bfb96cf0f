"""What llama.cpp says: greedy text of a GGUF file, with the logits before each of its tokens."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Said:
    """`logits` [len(token_ids), vocab]: row i is what token i was chosen by."""

    token_ids: list[int]
    logits: np.ndarray

    @property
    def margins(self) -> np.ndarray:
        """By how much the best logit is above the second."""
        best = np.sort(self.logits, axis=-1)[:, -2:]
        return best[:, 1] - best[:, 0]


def greedy(file: Path, prompts: list[list[int]], tokens: int, threads: int = 2) -> list[Said]:
    from llama_cpp import Llama

    model = Llama(str(file), n_ctx=512, n_threads=threads, logits_all=True, verbose=False, seed=0)
    said = []
    for prompt in prompts:
        model.reset()
        model.eval(prompt)
        ids: list[int] = []
        rows: list[np.ndarray] = []
        for _ in range(tokens):
            rows.append(np.array(model.scores[model.n_tokens - 1]))
            ids.append(int(rows[-1].argmax()))
            model.eval([ids[-1]])
        said.append(Said(ids, np.stack(rows)))
    return said
