"""What a grammar costs a request and a step, with a vocabulary of 49,152 tokens (the demo model's).

Run: python -m tests.bench.grammar_masks
"""

import json
import statistics
import time

import numpy as np
import torch

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.checkpoint.tokenizer import tokenizer_files
from moebius_worker.demo import dense_demo_model
from moebius_worker.engine.grammar.compiler import grammar_tokenizer
from moebius_worker.engine.grammar.matcher import GrammarMatcher
from moebius_worker.engine.token_masks import mask_logits
from moebius_worker.engine.types import SampleRow, SamplingParams
from tests.bench.rig import machine, quantile

STEPS, ROWS = 400, 32
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "both"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "a record": {"json_schema": PERSON},
    "any JSON object": {"json_schema": {"type": "object"}},
    "/[a-z ]{1,400}/": {"lark_grammar": "start: /[a-z ]{1,400}/"},
    "a choice": {"lark_grammar": 'start: "yes" | "no"'},
}


def main() -> None:
    checkpoint = open_checkpoint(str(dense_demo_model()))
    content = tokenizer_files(checkpoint)["tokenizer.json"]
    begun = time.perf_counter()
    tokenizer = grammar_tokenizer(content, 49_152, checkpoint.eos_token_ids)
    print(machine())
    print(f"tokenizer made in {time.perf_counter() - begun:.2f} s, once for an engine")
    print("microseconds       compiling     mask   99 % below     token taken")
    draw = np.random.default_rng(0)
    row = np.zeros((1, tokenizer.vocab_size // 32), dtype=np.int32)
    for name, part in GRAMMARS.items():
        grammar = json.dumps({"grammars": [part]})
        compiling, masks, taken = [], [], []
        complete = True
        for _ in range(STEPS):
            if complete:
                begun = time.perf_counter()
                matcher = GrammarMatcher(tokenizer, grammar, ())
                compiling.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            matcher.raw.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            masks.append(time.perf_counter() - begun)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            begun = time.perf_counter()
            complete = matcher.accept(int(draw.choice(allowed)))
            taken.append(time.perf_counter() - begun)
        figures = (
            *map(statistics.median, (compiling, masks)),
            quantile(masks, 0.99),
            statistics.median(taken),
        )
        print(f"{name:<17}" + "".join(f"{1e6 * figure:>12.0f}" for figure in figures))
    logits = torch.randn(ROWS, 49_152)
    rows = [SampleRow(SamplingParams(), (), (), allowed=row[0])] * ROWS
    mask_logits(logits, rows)
    begun = time.process_time()
    for _ in range(10):
        mask_logits(logits, rows)
    print(f"applied to {ROWS} rows of logits: {1e5 * (time.process_time() - begun):.0f} us of CPU")


if __name__ == "__main__":
    main()
