"""How the byte-level BPE vocabularies cut text before merging, by the name in `tokenizer.ggml.pre`.

The names and their meaning are llama.cpp's (src/llama-vocab.cpp); the cuts are those of the models' own
`tokenizer.json`, whose normalisation GGUF does not tell.
"""

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, slots=True)
class ByteLevelKind:
    """Patterns that cut the text one after the other; every match and what lies between is a piece."""

    patterns: tuple[str, ...]
    # A piece that is a token as a whole is taken whole, whatever the merges would make of it.
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False


_GPT2_KIND = ByteLevelKind((_GPT2,))
_DIGITS_KIND = ByteLevelKind((r"\p{N}", _GPT2))
_LLAMA3_KIND = ByteLevelKind((_LLAMA3,), ignore_merges=True, adds_bos=True)
BYTE_LEVEL_KINDS = {
    # What llama.cpp takes for files that name no pre-tokenizer.
    "default": ByteLevelKind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2"), _GPT2_KIND),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS_KIND),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), _LLAMA3_KIND),
    "qwen2": ByteLevelKind((_QWEN2,), nfc=True),
    "qwen35": ByteLevelKind((_QWEN35,), nfc=True),
    "deepseek-r1-qwen": ByteLevelKind((_QWEN2,)),
    "deepseek-v3": ByteLevelKind(_DEEPSEEK_V3),
    **dict.fromkeys(("gpt-4o", "llama4"), ByteLevelKind((_O200K,), ignore_merges=True)),
    "minimax-m2": ByteLevelKind((_O200K,)),
    **dict.fromkeys(("chatglm-bpe", "glm4"), ByteLevelKind((_LLAMA3,), ignore_merges=True)),
    "tekken": ByteLevelKind((_TEKKEN,), ignore_merges=True, adds_bos=True),
}


def byte_level_pre_tokenizer(kind: ByteLevelKind) -> pre_tokenizers.PreTokenizer:
    """Cuts by the patterns, then writes each byte as a letter."""
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in kind.patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
