"""Tokenizers made of GGUF metadata give the ids of the tokenizers that the metadata was made of."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.file import read_gguf
from moebius_worker.checkpoint.gguf.tokenizer import gguf_tokenizer_files
from moebius_worker.demo import dense_demo_model
from tests.worker.checkpoint.gguf_files import byte_level_metadata
from tests.worker.checkpoint.gguf_models import DATA
from tests.worker.checkpoint.gguf_tokenizers import TEXT, converted, strings

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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


@pytest.mark.parametrize("path", sorted((DATA / "tokenizers").glob("*.json")), ids=lambda path: path.stem)
def test_cut_down_vocabularies_give_the_ids_of_the_models_own_tokenizers(tmp_path: Path, path: Path) -> None:
    content = json.loads(path.read_text())
    tokenizer, _ = converted(tmp_path, content["metadata"])
    assert len(content["cases"]) == 20
    for text, ids in content["cases"]:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, repr(text)
        written = unicodedata.normalize("NFC", text) if path.stem == "qwen3" else text
        assert tokenizer.decode(ids, skip_special_tokens=False) == written


def test_qwen_3_5s_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    model = json.loads(byte_level(split(QWEN2)).to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    transformers_tokenizer = Qwen3_5Tokenizer(vocab=model["vocab"], merges=merges)
    transformers_tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    original = transformers_tokenizer.backend_tokenizer
    tokenizer, _ = converted(tmp_path, metadata_of(original, tmp_path, "qwen35"))
    marks = ["कि का हिन्दी भाषा", "e\u0301\u0302x \u0301", "ก็ ที่", "a\u0301b1\u0301"]
    qwen2, _ = converted(tmp_path, metadata_of(original, tmp_path, "qwen2"))
    differing = 0
    for text in [*strings(), *marks]:
        expected = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, repr(text)
        differing += qwen2.encode(text, add_special_tokens=False).ids != expected
    assert differing


def test_the_kinds_differ_on_the_strings_they_are_compared_on(tmp_path: Path) -> None:
    """So that the comparison above can fail: each kind cuts some string otherwise than each other."""
    original = byte_level([GPT2])
    metadata = metadata_of(original, tmp_path, "gpt-2")
    ids = {}
    for pre in (
        *("smollm", "gpt-2", "llama-bpe", "qwen2", "qwen35", "default", "tekken"),
        *("gpt-4o", "deepseek-v3"),
    ):
        tokenizer, _ = converted(tmp_path, metadata | {"tokenizer.ggml.pre": pre})
        pieces = [tokenizer.pre_tokenizer.pre_tokenize_str(text) for text in strings()]
        ids[pre] = [[piece for piece, _ in line] for line in pieces]
    assert len({json.dumps(value) for value in ids.values()}) == len(ids)
    tokenizer, _ = converted(tmp_path, metadata | {"tokenizer.ggml.pre": "default"})
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("12345")] == ["123", "45"]


def test_an_ordinary_word_is_no_unknown_token(tmp_path: Path) -> None:
    metadata = metadata_of(byte_level([GPT2]), tmp_path, "minimax-m2")
    word = metadata["tokenizer.ggml.tokens"].index("Ġthe")
    _, config = converted(tmp_path, metadata | {"tokenizer.ggml.unknown_token_id": word})
    assert "unk_token" not in config
    _, config = converted(tmp_path, metadata | {"tokenizer.ggml.unknown_token_id": 0})
    assert config["unk_token"] == "<|endoftext|>"


def test_an_end_of_the_text_is_special_although_it_is_among_the_pieces(tmp_path: Path) -> None:
    metadata = metadata_of(byte_level([GPT2]), tmp_path, "gpt-2")
    metadata["tokenizer.ggml.token_type"][2] = 1  # <|im_end|>
    tokenizer, _ = converted(tmp_path, metadata)
    assert tokenizer.encode("a<|im_end|>").ids[-1] == 2
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>").ids) == "a"


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
