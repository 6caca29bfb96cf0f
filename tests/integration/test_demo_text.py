"""The demo model's recipe: an upcycled model without noise says exactly what the dense model says."""

from pathlib import Path

import pytest
import torch

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.checkpoint.tokenizer import tokenizer_files
from moebius_worker.demo import dense_demo_model
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice
from moebius_worker.upcycle import UpcycleOptions, upcycle

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain what a prime number is.",
    "List three fruits and their colours.",
    "How do I boil an egg?",
)
TOKENS = 64


def greedy(location: Path, prompts: list[list[int]]) -> list[list[int]]:
    """`TOKENS` greedy ids for each prompt, computed as one batch."""
    options = RunnerOptions(dtype="float32", kv_cache_bytes=512 << 20, max_step_tokens=512, threads=1)
    runner = ModelRunner.load(open_checkpoint(str(location)), options, lambda *_: None)
    pages_each = -(-(max(map(len, prompts)) + TOKENS) // runner.layout.page_size)
    tables = [tuple(range(i * pages_each, (i + 1) * pages_each)) for i in range(len(prompts))]
    texts = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    for _ in range(TOKENS):
        slices = [
            Slice(i, tuple(text[computed[i] :]), computed[i], tables[i], sample=True)
            for i, text in enumerate(texts)
        ]
        best = runner.step(slices).logits.argmax(-1).tolist()
        for i, token in enumerate(best):
            computed[i] = len(texts[i])
            texts[i].append(token)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.timeout(300)
def test_upcycled_text_equals_dense_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    dense = dense_demo_model()
    moe = tmp_path / "moe"
    upcycle(str(dense), moe, UpcycleOptions(experts=4, top_k=2, noise=0.0, dtype="float32"))

    tokenizer = Tokenizer.from_str(tokenizer_files(open_checkpoint(str(dense)))["tokenizer.json"].decode())
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in QUESTIONS
    ]
    with torch.inference_mode():
        said = greedy(dense, prompts)
        assert greedy(moe, prompts) == said
    assert "Paris" in tokenizer.decode(said[0])
