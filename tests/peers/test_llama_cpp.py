"""The same files in llama.cpp: the same greedy text, as long as the choice is not closer than rounding.

llama.cpp quantises activations to 8 bits before it multiplies, and we do not: its logits differ from ours by
that. Where its two best tokens are farther apart than the logits differ, the choice must be the same.
"""

from pathlib import Path

import numpy as np
import pytest

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.checkpoint.tokenizer import tokenizer_files
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.types import Slice
from tests.peers.files import FILES
from tests.peers.llama_cpp_texts import Said, greedy

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: make test-peers")

PROMPTS = {
    "SmolLM2 Q4_1": [
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in ("What is the capital of France?", "Write a short poem about the sea.")
    ],
    "Gemma 3 Q4_K_M": ["The capital of France is", "Once upon a time, in a small village by the sea,"],
}
PROMPTS["demo, Q8_0"] = PROMPTS["SmolLM2 Q4_1"]
TOKENS = 32
# Of the logits' standard deviation over the vocabulary: how far ours are from llama.cpp's, in the mean.
CLOSE = 0.05


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def encode(file: Path, texts: list[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_files(open_checkpoint(str(file)))["tokenizer.json"].decode())
    return [tokenizer.encode(text).ids for text in texts]


def ours(file: Path, prompts: list[list[int]], said: list[Said], *, expand: bool) -> list[np.ndarray]:
    """Our logits before each token of what llama.cpp said."""
    options = RunnerOptions(kv_cache_bytes=256 << 20, threads=2, expand_weights=expand, max_running=4)
    runner = ModelRunner.load(open_checkpoint(str(file)), options)
    pages = tuple(range(256 // runner.layout.page_size))
    found = []
    for prompt, text in zip(prompts, said, strict=True):
        ids = prompt + text.token_ids
        rows = []
        for start, end in [(0, len(prompt)), *((i, i + 1) for i in range(len(prompt), len(ids) - 1))]:
            piece = Slice(0, tuple(ids[start:end]), start, pages, sample=True, window_pages=pages)
            rows.append(runner.step([piece]).logits[0].numpy())
        found.append(np.stack(rows))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_the_same_text(name: str, directory: Path) -> None:
    file = FILES[name](directory)
    prompts = encode(file, PROMPTS[name])
    said = greedy(file, prompts, TOKENS)
    for text, logits in zip(said, ours(file, prompts, said, expand=True), strict=True):
        differences = np.abs(logits - text.logits)
        assert differences.mean() < CLOSE * text.logits.std()
        # Four standard deviations of the difference of two errors.
        clear = text.margins > 4 * np.sqrt(2 * np.square(differences).mean(axis=-1))
        assert clear.sum() > TOKENS / 4
        chosen = logits.argmax(-1)
        assert (chosen == text.token_ids)[clear].all()
        # And where it is not clear, llama.cpp's choice is among our best.
        behind = logits.max(-1) - np.take_along_axis(logits, np.array(text.token_ids)[:, None], -1)[:, 0]
        assert behind.max() < 2 * differences.max()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_tokens_are_llama_cpps(name: str, directory: Path) -> None:
    file = FILES[name](directory)
    model = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    texts = [*PROMPTS[name], "naïve café – 東京 🙂 1234567 x+=1\n\n\tfoo", " leading and trailing "]
    add_bos = bool(open_checkpoint(str(file)).config.get("bos_token_id")) and name.startswith("Gemma")
    for text, ids in zip(texts, encode(file, texts), strict=True):
        assert ids == model.tokenize(text.encode(), add_bos=add_bos, special=True)
