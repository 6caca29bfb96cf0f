"""SentencePiece vocabularies in GGUF: with scores (llama) and with merges (gemma4)."""

import heapq
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf import tokenizer as gguf_tokenizer
from tests.worker.checkpoint.gguf_tokenizers import TEXT, converted, strings


def gemma(tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """A tokenizer of transformers as Gemma has it, and what llama.cpp's converter makes of it."""
    from transformers import GemmaTokenizer

    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    first = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|turn>", "<turn|>", "<|tool_call>"]
    tokens = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    # Without some letters, which are told as bytes.
    tokens = [token for token in tokens if token not in ("é", "字", "🙂")]
    merges = [(a, b) for a, b in model["merges"] if {a, b, a + b} <= set(tokens)]
    original = GemmaTokenizer(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    original.add_special_tokens({"additional_special_tokens": ["<|turn>", "<turn|>"]})
    original.add_tokens(["<|tool_call>"])
    types = [3, 3, 3, 3, 3, 3, 3, 4, *[6] * 256, *[1] * (len(tokens) - 264)]
    return original, {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_gemma_4s_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    original, metadata = gemma(tmp_path)
    tokenizer, config = converted(tmp_path, metadata)
    longer = in_bytes = 0
    for text in [*strings(), "<|turn>user\n字 é🙂<turn|>\n<|tool_call> x"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == original.encode(text, add_special_tokens=False), repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        longer += sum(len(metadata["tokenizer.ggml.tokens"][index]) > 1 for index in ids if index > 264)
        in_bytes += sum(8 <= index < 264 for index in ids)
    assert longer > 100
    assert in_bytes > 100
    assert tokenizer.encode("x").ids[0] == 2
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<bos>", "<eos>", True)


def test_gemma_4s_vocabulary_without_merges_is_refused(tmp_path: Path) -> None:
    _, metadata = gemma(tmp_path)
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match="without its merges"):
        converted(tmp_path, metadata)


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


def test_runs_of_spaces_are_pieces_however_the_text_has_them(tmp_path: Path) -> None:
    """As in Gemma, where spaces are written as pieces have them before anything is looked for."""
    tokens, scores, types = sentencepiece_vocabulary()
    metadata = sentencepiece_metadata() | {
        "tokenizer.ggml.tokens": [*tokens, "  ", "    "],
        "tokenizer.ggml.scores": [*scores, -1000.0, -1000.0],
        "tokenizer.ggml.token_type": [*types, 4, 4],
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer, _ = converted(tmp_path, metadata)
    two, four = len(tokens), len(tokens) + 1
    fox = sentencepiece_ids("fox", tokens, scores, types)
    for text in ("fox    fox  fox", "fox▁▁▁▁fox▁▁fox", "fox ▁▁ fox ▁fox"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == [*fox, four, *fox, two, *fox]
        assert tokenizer.decode(ids) == "fox    fox  fox"


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
