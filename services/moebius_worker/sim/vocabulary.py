"""What a simulated model's tokens spell: those of a checkpoint, or of a small tokenizer of its own."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.tokenizer import tokenizer_files

SIM_NAME = "sim"
# A word with the space before it, as byte-level BPE and SentencePiece write that.
_WORD = re.compile("[Ġ▁][a-z]{1,12}")
_MAX_WORDS = 4096
_CLOSING = '"}],'
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT = """
a about above across after again air all along also always and animal another answer any around ask at away
back be because before began below between big book both boy but by call came can car carry change children
city close cold come could country cut day did different do does down each early earth eat end enough even
every example eye face family far father feet few find first follow food for form found four from get give
go good great group grow had hand hard has have he head hear help her here high him his home house how idea
if important in into is it just keep kind know land large last later learn leave left letter life light like
line list little live long look made make man many may me mean men might mile more most mother mountain move
much must my name near need never new next night no not now number of off often old on one only open or
other our out over own page paper part people place plant play point put question read really red right
river run said same saw say school sea second see seem sentence set she should show side small so some
something sometimes song soon sound spell start state stop story study such take talk tell than that the
their them then there these they thing think this those three through time to together too took tree try
turn two under until up us use very walk want was watch water way we well went were what when where which
while white who why will with without word work world would write year you young your
"""
_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Vocabulary:
    """`files`: a tokenizer's, by name. `words`: ids that an answer is made of."""

    name: str
    files: dict[str, bytes]
    size: int
    words: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    # Tokens that end a value of JSON, or another one before it; inside of a string the first alone does.
    closing: tuple[int, ...]
    # Tokens that the model was made for; None if nobody says.
    context: int | None = None


def vocabulary(model: str) -> Vocabulary:
    """Of the checkpoint at `model`, of which no weights are read, or its own if that is empty.

    Raises CheckpointError.
    """
    if not model:
        return _own()
    checkpoint = open_checkpoint(model)
    files = tokenizer_files(checkpoint)
    ids = _ids(json.loads(files["tokenizer.json"]))
    words = sorted(token_id for token, token_id in ids.items() if _WORD.fullmatch(token))[:_MAX_WORDS]
    if not words:
        raise CheckpointError(f"The tokenizer of {model} has no words that a simulated model could say.")
    config = checkpoint.config.get("text_config") or checkpoint.config
    size = max(*ids.values(), config.get("vocab_size", 1) - 1) + 1
    context = config.get("max_position_embeddings")
    eos = checkpoint.eos_token_ids
    return Vocabulary(checkpoint.name, files, size, tuple(words), eos, _closing(ids), context)


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    vocab = tokenizer["model"]["vocab"]
    # Unigram lists tokens with their scores.
    plain = vocab if isinstance(vocab, dict) else {entry[0]: index for index, entry in enumerate(vocab)}
    return plain | {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}


def _closing(ids: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(ids[mark] for mark in _CLOSING if mark in ids)


def _own() -> Vocabulary:
    """Bytes and common words; ChatML."""
    tokens = [*_SPECIAL, *_byte_letters(), *("Ġ" + word for word in _TEXT.split())]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, content in enumerate(_SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []},
    }
    config = {"eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    files = {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": b"{}",
    }
    words = tuple(range(len(_SPECIAL) + 256, len(tokens)))
    ids = {token: index for index, token in enumerate(tokens)}
    return Vocabulary(SIM_NAME, files, len(tokens), words, (ids["<|im_end|>"],), _closing(ids))


def _byte_letters() -> list[str]:
    """What byte-level BPE writes for each byte: printable ones stay, the others are moved to 256 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(256, 512))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
