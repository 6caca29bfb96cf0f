"""A GGUF file's vocabulary, told as `tokenizer.json` and `tokenizer_config.json`.

Three kinds of vocabulary: `gpt2`, byte-level BPE with stored merges; `llama`, SentencePiece BPE with scores;
`gemma4`, SentencePiece pieces with stored merges. The ids must be those of the tokenizer that the model was
trained with, so that what is not known is refused by name.
"""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.config import gguf_generation_config
from moebius_worker.checkpoint.gguf.file import Gguf
from moebius_worker.checkpoint.gguf.pre_tokenizers import BYTE_LEVEL_KINDS, byte_level_pre_tokenizer

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


def gguf_tokenizer_files(gguf: Gguf) -> dict[str, bytes]:
    """`tokenizer.json` and `tokenizer_config.json` made of the metadata. Raises CheckpointError."""
    keys = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in gguf.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    model, tokens = keys.get("model"), keys.get("tokens")
    if model is None or not tokens:
        raise CheckpointError(f"{gguf.path} holds no tokenizer. Use a file that was converted with one.")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _merged_pieces}
    if model not in makers:
        raise CheckpointError(
            f"{gguf.path}: the tokenizer model {model!r} is not supported. Supported are gpt2 "
            "(byte-level BPE), llama and gemma4 (SentencePiece BPE)."
        )
    types: list[int] = keys.get("token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"{gguf.path} is damaged: {len(tokens)} tokens have {len(types)} types.")
    tokenizer = makers[model](gguf, keys, types)
    # Gemma's runs of spaces: pieces, which the converter wrote with plain ones. A prefix would alter them.
    are_pieces = model != "gpt2" and not keys.get("add_space_prefix", model == "llama")
    # Some files have an end of the text among the pieces of text.
    ends = set(gguf_generation_config(gguf)["eos_token_id"])
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=are_pieces and " " in token)
            for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) or index in ends
        ]
    )
    special = {name: _token(gguf, keys, key) for name, key in _SPECIAL.items()}
    if special["unk_token"] is not None and types[keys["unknown_token_id"]] == _NORMAL:
        special["unk_token"] = None  # MiniMax M2's files name an ordinary word
    add_bos = bool(keys.get("add_bos_token", model != "gpt2" or _adds_bos(keys)))
    add_eos = bool(keys.get("add_eos_token", False))
    around = [special["bos_token"] if add_bos else None, "$A", special["eos_token"] if add_eos else None]
    template = [piece for piece in around if piece is not None]
    if template != ["$A"]:
        ids = [(piece, tokens.index(piece)) for piece in dict.fromkeys(template) if piece != "$A"]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: token for name, token in special.items() if token is not None},
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
    }
    if (chat_template := gguf.metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = chat_template
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
    }


_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _token(gguf: Gguf, keys: Mapping[str, Any], key: str) -> str | None:
    index = keys.get(key)
    if index is None:
        return None
    if not 0 <= index < len(keys["tokens"]):
        raise CheckpointError(f"{gguf.path}: tokenizer.ggml.{key} = {index} is outside the vocabulary.")
    return keys["tokens"][index]


def _adds_bos(keys: Mapping[str, Any]) -> bool:
    kind = BYTE_LEVEL_KINDS.get(keys.get("pre", "default"))
    return kind is not None and kind.adds_bos


def _byte_level(gguf: Gguf, keys: Mapping[str, Any], types: list[int]) -> Tokenizer:
    name = keys.get("pre", "default")
    kind = BYTE_LEVEL_KINDS.get(name)
    if kind is None:
        raise CheckpointError(
            f"{gguf.path}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported, and to guess "
            f"would change the token ids. Supported are {', '.join(sorted(BYTE_LEVEL_KINDS))}."
        )
    merges = _stored_merges(gguf, keys)
    tokenizer = Tokenizer(_bpe(gguf, _ids(keys), merges, ignore_merges=kind.ignore_merges))
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = byte_level_pre_tokenizer(kind)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: Gguf, keys: Mapping[str, Any], types: list[int]) -> Tokenizer:
    if keys.get("precompiled_charsmap") or keys.get("remove_extra_whitespaces"):
        raise CheckpointError(
            f"{gguf.path}: a SentencePiece vocabulary that normalises text is not supported."
        )
    tokens, scores = keys["tokens"], keys.get("scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(
            f"{gguf.path} holds a SentencePiece vocabulary without the scores of its pieces."
        )
    pieces = {token: scores[i] for i, token in enumerate(tokens) if types[i] == _NORMAL}
    return _pieces(gguf, keys, types, _merges(pieces, _ids(keys)))


def _merged_pieces(gguf: Gguf, keys: Mapping[str, Any], types: list[int]) -> Tokenizer:
    return _pieces(gguf, {"add_space_prefix": False, **keys}, types, _stored_merges(gguf, keys))


def _pieces(
    gguf: Gguf, keys: Mapping[str, Any], types: list[int], merges: list[tuple[str, str]]
) -> Tokenizer:
    """BPE over characters, bytes of those that are no pieces, as SentencePiece has it."""
    unknown = _token(gguf, keys, "unknown_token_id")
    if unknown is None and _UNKNOWN in types:
        unknown = keys["tokens"][types.index(_UNKNOWN)]
    byte_fallback = _BYTE in types
    tokenizer = Tokenizer(
        _bpe(gguf, _ids(keys), merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    # SentencePiece writes spaces as this, and puts one before the text and after each special token.
    space = "▁"
    prefix = [normalizers.Prepend(space)] if keys.get("add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", space)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _ids(keys: Mapping[str, Any]) -> dict[str, int]:
    return {token: index for index, token in enumerate(keys["tokens"])}


def _stored_merges(gguf: Gguf, keys: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not keys.get("merges"):
        raise CheckpointError(f"{gguf.path} holds a BPE vocabulary without its merges.")
    # The first character may be a space that belongs to the piece.
    cuts = ((merge, merge.find(" ", 1)) for merge in keys["merges"])
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]


def _bpe(gguf: Gguf, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab, merges, **options)
    # `tokenizers` raises no narrower class when, for one, a merge names a token that is not there.
    except Exception as error:
        raise CheckpointError(f"{gguf.path}: vocabulary and merges do not fit together: {error}") from error


def _merges(pieces: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """What SentencePiece's scores amount to: all pairs that make a piece, the best piece first."""
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    return sorted(merges, key=lambda pair: (-pieces[pair[0] + pair[1]], ids[pair[0]], ids[pair[1]]))
