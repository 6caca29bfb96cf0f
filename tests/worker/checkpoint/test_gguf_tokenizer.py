"""Tokenizers made of GGUF metadata give the ids of the tokenizers that the metadata was made of."""

import heapq
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf import tokenizer as gguf_tokenizer
from moebius_worker.checkpoint.gguf.file import read_gguf
from moebius_worker.checkpoint.gguf.tokenizer import gguf_tokenizer_files
from moebius_worker.demo import dense_demo_model
from tests.tiny import CORPUS
from tests.worker.checkpoint.gguf_files import byte_level_metadata, write_gguf

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
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


def byte_level(splits: list[Any], *, ignore_merges: bool = False, nfc: bool = False) -> Tokenizer:
    """A trained tokenizer, built as the model families' own `tokenizer.json` are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if nfc else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>", normalized=False)])
    if not ignore_merges:
        return tokenizer
    content = json.loads(tokenizer.to_str())
    content["model"]["ignore_merges"] = True
    # A word that merges do not reach: it shows whether whole words are looked up first.
    content["model"]["vocab"]["Ġreasons"] = max(content["model"]["vocab"].values()) + 100
    return Tokenizer.from_str(json.dumps(content))


def split(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def converted(tmp_path: Path, metadata: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    path = write_gguf(tmp_path / "m.gguf", metadata, {"token_embd.weight": np.ones((1, 1), dtype=np.float32)})
    files = gguf_tokenizer_files(read_gguf(path))
    return Tokenizer.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"])


def metadata_of(tokenizer: Tokenizer, tmp_path: Path, pre: str) -> dict[str, Any]:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    size = 1 + max([*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])])
    return byte_level_metadata(tmp_path / "tokenizer.json", pre, size)


@pytest.mark.parametrize(
    ("pre", "splits", "options"),
    [
        ("smollm", [pre_tokenizers.Digits(individual_digits=True), GPT2], {}),
        ("gpt-2", [GPT2], {}),
        ("llama-bpe", split(LLAMA3), {"ignore_merges": True}),
        ("qwen2", split(QWEN2), {"nfc": True}),
    ],
)
def test_byte_level_ids_equal_the_originals(tmp_path: Path, pre: str, splits: list, options: dict) -> None:
    original = byte_level(splits, **options)
    tokenizer, _ = converted(tmp_path, metadata_of(original, tmp_path, pre))
    for text in strings():
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert encoding.ids == original.encode(text, add_special_tokens=False).ids, repr(text)
        expected = original.decode(encoding.ids, skip_special_tokens=False)
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == expected
        assert tokenizer.decode(encoding.ids) == original.decode(encoding.ids)
    assert expected


def test_the_kinds_differ_on_the_strings_they_are_compared_on(tmp_path: Path) -> None:
    """So that the comparison above can fail: each kind cuts some string otherwise than each other."""
    original = byte_level([GPT2])
    metadata = metadata_of(original, tmp_path, "gpt-2")
    ids = {}
    for pre in ("smollm", "gpt-2", "llama-bpe", "qwen2", "default", "tekken"):
        tokenizer, _ = converted(tmp_path, metadata | {"tokenizer.ggml.pre": pre})
        pieces = [tokenizer.pre_tokenizer.pre_tokenize_str(text) for text in strings()]
        ids[pre] = [[piece for piece, _ in line] for line in pieces]
    assert len({json.dumps(value) for value in ids.values()}) == len(ids)
    tokenizer, _ = converted(tmp_path, metadata | {"tokenizer.ggml.pre": "default"})
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("12345")] == ["123", "45"]


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    metadata = metadata_of(byte_level([GPT2]), tmp_path, "poro-chat")
    with pytest.raises(CheckpointError, match="pre-tokenizer 'poro-chat'"):
        converted(tmp_path, metadata)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.tokens": []}, "holds no tokenizer"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5'"),
        ({"tokenizer.ggml.merges": []}, "without its merges"),
        ({"tokenizer.ggml.merges": ["Ġ nowhere"]}, "do not fit together"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 types"),
        ({"tokenizer.ggml.bos_token_id": 100_000}, "bos_token_id = 100000"),
    ],
)
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    metadata = metadata_of(byte_level([GPT2]), tmp_path, "gpt-2") | change
    with pytest.raises(CheckpointError, match=message):
        converted(tmp_path, {key: value for key, value in metadata.items() if value != []})


@pytest.mark.parametrize(
    ("pre", "flags", "begins", "ends"),
    [
        ("gpt-2", {}, False, False),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False, False),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, True, True),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, pre: str, flags: dict, begins: bool, ends: bool
) -> None:
    metadata = metadata_of(byte_level([GPT2]), tmp_path, pre) | flags
    metadata |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    tokenizer, config = converted(tmp_path, metadata)
    ids = tokenizer.encode("hello").ids
    assert (ids[0] == 1, ids[-1] == 2) == (begins, ends)
    assert tokenizer.encode("hello", add_special_tokens=False).ids == ids[int(begins) : len(ids) - int(ends)]
    assert (config["add_bos_token"], config["add_eos_token"]) == (begins, ends)
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["chat_template"] == "{{ messages }}"


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types as Llama has them: specials, bytes, then pieces, the first merged the best."""
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(TEXT, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    merged = list(dict.fromkeys("".join(merge) for merge in content["merges"]))
    single = [piece for piece in content["vocab"] if len(piece) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *single]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(merged) + len(single))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(single))]
    return tokens, scores, types


def sentencepiece_ids(text: str, tokens: list[str], scores: list[float], types: list[int]) -> list[int]:
    """SentencePiece's BPE: merge the neighbours whose piece has the best score, the leftmost of equals."""
    ids = {token: index for index, token in enumerate(tokens) if types[index] == 1}
    symbols: list[str | None] = list(text.replace(" ", "▁"))
    following = list(range(1, len(symbols) + 1))
    heap: list[tuple[float, int, str, str]] = []

    def consider(left: int) -> None:
        right = following[left]
        if right < len(symbols) and (piece := symbols[left] + symbols[right]) in ids:
            heapq.heappush(heap, (-scores[ids[piece]], left, symbols[left], symbols[right]))

    for index in range(len(symbols)):
        consider(index)
    while heap:
        _, left, first, second = heapq.heappop(heap)
        right = following[left]
        if symbols[left] != first or right >= len(symbols) or symbols[right] != second:
            continue
        symbols[left], symbols[right] = first + second, None
        following[left] = following[right]
        before = max((i for i in range(left) if symbols[i] is not None), default=None)
        if before is not None:
            consider(before)
        consider(left)
    out: list[int] = []
    for symbol in symbols:
        if symbol is not None:
            fallback = [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
            out += [ids[symbol]] if symbol in ids else fallback
    return out


def sentencepiece_metadata() -> dict[str, Any]:
    tokens, scores, types = sentencepiece_vocabulary()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_ids_equal_the_algorithms(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary()
    tokenizer, config = converted(tmp_path, sentencepiece_metadata())
    longer = 0
    for text in filter(None, strings()):
        expected = sentencepiece_ids(" " + text, *vocabulary)
        assert tokenizer.encode(text).ids == [1, *expected], repr(text)
        assert tokenizer.decode(expected) == text
        longer += sum(len(vocabulary[0][index]) > 2 for index in expected if index > 258)
    assert longer > 100
    assert config["add_bos_token"] is True
    assert config["unk_token"] == "<unk>"


def test_sentencepiece_writes_the_space_after_each_special_token(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary()
    tokenizer, _ = converted(tmp_path, sentencepiece_metadata())
    the_capital = sentencepiece_ids(" The capital", *vocabulary)
    assert tokenizer.encode("The capital</s>The capital").ids == [1, *the_capital, 2, *the_capital]


def test_sentencepiece_without_prefix(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary()
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer, _ = converted(tmp_path, metadata)
    assert tokenizer.encode("The fox").ids == [1, *sentencepiece_ids("The fox", *vocabulary)]
    assert tokenizer.decode(sentencepiece_ids(" The fox", *vocabulary)) == " The fox"


def test_sentencepiece_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    with pytest.raises(CheckpointError, match="normalises text"):
        converted(tmp_path, metadata | {"tokenizer.ggml.remove_extra_whitespaces": True})
    with pytest.raises(CheckpointError, match="scores"):
        converted(tmp_path, {key: value for key, value in metadata.items() if "scores" not in key})


def test_sentencepiece_that_does_not_fit_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_tokenizer, "_merges", lambda pieces, ids: [("nowhere", "to be found")])
    with pytest.raises(CheckpointError, match="do not fit together"):
        converted(tmp_path, sentencepiece_metadata())


def test_smollm2s_ids_equal_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    path = dense_demo_model()
    files = gguf_tokenizer_files(read_gguf(path))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers takes GPT-2's cuts for it; the model's own tokenizer also cuts digits (and ½) apart.
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), GPT2]
    )
    for text in strings():
        ids = tokenizer.encode(text).ids
        assert ids == reference.encode(text, add_special_tokens=False), repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == (reference.bos_token, reference.eos_token)
    assert config["chat_template"] == reference.chat_template
