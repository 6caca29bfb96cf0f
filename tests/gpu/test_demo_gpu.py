"""The demo model says on a GPU what it says on a CPU.

In bf16 with kernels and graphs there, in fp32 here. Where the best tokens are nearly equal either will do, so
each token of the GPU's is looked up among what the CPU computes after the GPU's text so far.
"""

from pathlib import Path

import pytest
import torch

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tokenizer import tokenizer_files
from moebius_worker.demo import demo_model, dense_demo_model
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice
from tests.gpu.test_engine_gpu import triton
from tests.integration.test_demo_text import QUESTIONS, TOKENS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")

# Nats that a token may be less likely than the best, and how many of a hundred may be less likely at all.
NEAR, FEW = 0.3, 8


def load(location: Path, device: str, dtype: str) -> ModelRunner:
    options = RunnerOptions(
        device=device,
        dtype=dtype,
        kv_cache_bytes=256 << 20,
        max_step_tokens=512,
        max_running=len(QUESTIONS),
        max_model_len=512,
        threads=8,
    )
    return ModelRunner.load(open_checkpoint(str(location)), options)


def answers(
    runner: ModelRunner, prompts: list[list[int]], given: list[list[int]] | None = None
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy ids after each prompt, or those that are `given`; how far each is below the best [TOKENS, N]."""
    each = -(-(max(map(len, prompts)) + TOKENS) // runner.layout.page_size)
    pages = [tuple(range(i * each, (i + 1) * each)) for i in range(len(prompts))]
    texts, done, short = [list(prompt) for prompt in prompts], [0] * len(prompts), []
    for place in range(TOKENS):
        slices = [
            Slice(i, tuple(text[done[i] :]), done[i], pages[i], sample=True) for i, text in enumerate(texts)
        ]
        logits = runner.step(slices).logits.float().cpu()
        chosen = logits.argmax(-1) if given is None else torch.tensor([ids[place] for ids in given])
        short.append(logits.amax(-1) - logits.gather(-1, chosen[:, None])[:, 0])
        for i, token in enumerate(chosen.tolist()):
            done[i] = len(texts[i])
            texts[i].append(token)
    return [text[-TOKENS:] for text in texts], torch.stack(short)


@pytest.mark.timeout(300)
def test_the_demo_model_says_what_it_says_on_a_cpu(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    try:
        dense_demo_model()
    except CheckpointError as error:
        pytest.skip(str(error))
    model = demo_model(tmp_path)
    tokenizer = Tokenizer.from_str(tokenizer_files(open_checkpoint(str(model)))["tokenizer.json"].decode())
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in QUESTIONS
    ]
    gpu = load(model, "cuda", "bfloat16")
    gpu.bind(triton())
    gpu.capture(lambda size: size == len(QUESTIONS), lambda *_: None)
    said, _ = answers(gpu, prompts)
    _, short = answers(load(model, "cpu", "float32"), prompts, said)
    others = int((short > 0).sum())
    print(f"{others} of {short.numel()} tokens are not the CPU's, at most {short.max():.3f} nats below")
    for question, ids in zip(QUESTIONS, said, strict=True):
        print(question, "->", repr(tokenizer.decode(ids)))
    assert short.max() < NEAR
    assert others <= FEW * short.numel() // 100
