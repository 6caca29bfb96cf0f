"""Metadata with any value anywhere: config and tokenizer are read, or refused as the checkpoint's fault."""

import dataclasses
import random
from contextlib import suppress
from pathlib import Path

import pytest

from moebius_worker.checkpoint import checkpoint as opening
from moebius_worker.checkpoint import tokenizer as tokenizing
from moebius_worker.checkpoint.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from moebius_worker.checkpoint.gguf.file import Gguf, read_gguf
from tests.worker.checkpoint.gguf_models import FAMILIES, converted

VALUES = ["x", "", -1, 0, 1, 7, 2.5, True, [], ["x"], [1], [0], [[]], float("nan")]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "llama-bpe",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<e>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages }}",
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_configs(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf, source = read_gguf(converted(family, tmp_path)), random.Random(family)
    keys = [key for key in gguf.metadata if not key.startswith("general.")]
    for _ in range(200):
        spoilt = {**gguf.metadata, source.choice(keys): source.choice(VALUES)}
        monkeypatch.setattr(
            opening, "read_gguf", lambda path, to=spoilt: dataclasses.replace(gguf, metadata=to)
        )
        with suppress(CheckpointError):
            assert open_checkpoint(str(tmp_path / f"{family}.gguf")).config


@pytest.mark.parametrize("key", TOKENIZER)
def test_tokenizers(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("some.gguf")
    checkpoint = Checkpoint(path, "gguf", {}, {}, "some")

    def files(metadata: dict[str, object]) -> dict[str, bytes]:
        monkeypatch.setattr(tokenizing, "read_gguf", lambda path: Gguf(path, metadata, {}))
        return tokenizing.tokenizer_files(checkpoint)

    assert files(TOKENIZER)
    for value in VALUES:
        with suppress(CheckpointError):
            files(TOKENIZER | {key: value})
