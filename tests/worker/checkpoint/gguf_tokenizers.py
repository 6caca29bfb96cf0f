"""Texts that tokenizers are compared on, and tokenizers made of GGUF metadata."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from moebius_worker.checkpoint.gguf.file import read_gguf
from moebius_worker.checkpoint.gguf.tokenizer import gguf_tokenizer_files
from tests.tiny import CORPUS
from tests.worker.checkpoint.gguf_files import write_gguf

TEXT = [
    *CORPUS,
    "It's 2024, we've 1234567 reasons; DON'T panic! x2y 3.14159 v1.2.3 ½ ² Ⅷ ٣٤",
    "for i in range(10):\n\tprint(f'{i:>5}')   # spaces   and\ttabs\n\n\n\nend  \n  ",
    "naïve café cafe\u0301 Å A\u030a ﬁ",
    "🙂 👩‍👩‍👧 🇫🇷 e\u0301\u200b\u00a0x\u3000y",
    "中文字符，日本語テキスト。한국어 텍스트 ภาษาไทย עברית العربية",
]
TRICKY = [
    "",
    " ",
    "   ",
    "\n",
    "a",
    " a",
    "  a",
    "\t\ta  b",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<|im_end|> y",
    " <|im_start|> ",
    "<tool> {} </tool>",
    "<|im_start",
    "\ud7ff\ue000\U0010ffff",
]


def strings() -> Iterator[str]:
    """Text, its pieces, and random mixtures; equal at every run."""
    yield from TEXT
    yield from TRICKY
    source = random.Random(0)
    alphabet = "".join(TEXT) + " \n\t'0123456789" * 20
    for _ in range(300):
        pieces = ["".join(source.choices(alphabet, k=source.randint(1, 12))), source.choice(TRICKY)]
        source.shuffle(pieces)
        yield "".join(pieces)


def converted(tmp_path: Path, metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    path = write_gguf(tmp_path / "m.gguf", metadata, {"token_embd.weight": np.ones((1, 1), dtype=np.float32)})
    files = gguf_tokenizer_files(read_gguf(path))
    return Tokenizer.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"])
