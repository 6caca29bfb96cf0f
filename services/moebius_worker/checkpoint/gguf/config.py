"""GGUF metadata, told in the words of a Hugging Face `config.json`.

A key of the architecture that is not understood is refused by name: it may change what the model computes.
"""

from typing import Any

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.families import find_family
from moebius_worker.checkpoint.gguf.file import Gguf
from moebius_worker.checkpoint.gguf.keys import Keys

# Tokens that end a turn or the text, although the metadata may name only one of them.
_ENDS = {
    *("<|endoftext|>", "<|end_of_text|>", "<eos>"),
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
    *("<turn|>", "<|tool_response>", "<|return|>", "<|call|>", "<|user|>", "<|observation|>", "[e~["),
}
# In a vocabulary with this token, of gpt-oss, <|end|> only ends one of a turn's several messages.
_HARMONY_END = "<|return|>"
# GLM's: elsewhere it stands before what a user says, and ends nothing.
_GLM_START = "[gMASK]"


def gguf_config(gguf: Gguf) -> dict[str, Any]:
    """The `config.json` of a GGUF model. Raises CheckpointError for what cannot be computed faithfully."""
    family, keys = find_family(gguf), Keys(gguf)
    if not keys.has("token_embd.weight"):
        raise CheckpointError(f"{gguf.path} lacks the tensor token_embd.weight: it holds no language model.")
    config = {"architectures": [family.class_name], "model_type": family.model_type}
    config |= {name: value(keys) for name, value in family.config.items()}
    for key, allowed in family.only.items():
        keys.only(key, *allowed)
    if unknown := sorted(keys.prefix + key for key in keys.unknown - family.unread):
        raise CheckpointError(f"{gguf.path} has metadata that is not understood: {', '.join(unknown)}.")
    return config


def gguf_generation_config(gguf: Gguf) -> dict[str, Any]:
    """The `generation_config.json` of a GGUF model: the ids that begin and end a text."""
    ids = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids += gguf.metadata.get("tokenizer.ggml.eos_token_ids", [])
    tokens: list[str] = gguf.metadata.get("tokenizer.ggml.tokens", [])
    ends = _ENDS - ({"<|end|>"} if _HARMONY_END in tokens else set())
    ends -= {"<|user|>", "<|observation|>"} if _GLM_START not in tokens else set()
    ids += [index for index, token in enumerate(tokens) if token in ends]
    return {
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(index for index in ids if index is not None)),
    }
