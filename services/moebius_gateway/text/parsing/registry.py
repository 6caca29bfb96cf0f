"""All families, and which of them a checkpoint is of."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from moebius_gateway.text.parsing.families.deepseek import DEEPSEEK, DEEPSEEK_DSML
from moebius_gateway.text.parsing.families.gemma4 import GEMMA4
from moebius_gateway.text.parsing.families.generic import PLAIN, THINKING
from moebius_gateway.text.parsing.families.glm import GLM
from moebius_gateway.text.parsing.families.harmony import HARMONY
from moebius_gateway.text.parsing.families.hermes import HERMES
from moebius_gateway.text.parsing.families.kimi import KIMI
from moebius_gateway.text.parsing.families.llama3 import LLAMA3
from moebius_gateway.text.parsing.families.minimax import MINIMAX, MINIMAX_M1, MINIMAX_M3
from moebius_gateway.text.parsing.families.mistral import MISTRAL
from moebius_gateway.text.parsing.families.qwen3_coder import QWEN3_CODER
from moebius_gateway.text.parsing.spec import Channel, ParserSpec, Region

# The first that fits is taken, so the more specific ones come first.
FAMILIES = (
    HARMONY,
    GEMMA4,
    DEEPSEEK_DSML,
    DEEPSEEK,
    MINIMAX_M3,
    MINIMAX,
    MINIMAX_M1,
    KIMI,
    GLM,
    QWEN3_CODER,
    HERMES,
    MISTRAL,
    LLAMA3,
    THINKING,
    PLAIN,
)


def names() -> list[str]:
    return [spec.name for spec in FAMILIES]


def by_name(name: str) -> ParserSpec:
    """Raises `ValueError`, saying which names there are."""
    for spec in FAMILIES:
        if spec.name == name:
            return spec
    raise ValueError(f"there is no parser {name!r}; there are {', '.join(names())}")


def detect(chat_template: str, config: Mapping[str, Any], special_tokens: Collection[str]) -> ParserSpec:
    """The family whose markers the chat template writes.

    A template that says nothing of tools, or none at all (""), leaves it to the special tokens and then to
    the `model_type` of the model's config.json. The checkpoint's name is never looked at.
    """
    specific = [spec for spec in FAMILIES if spec not in (THINKING, PLAIN)]
    for spec in specific:
        if any(all(sign in chat_template for sign in signs) for signs in spec.signs):
            return spec
    for spec in specific:
        if spec.tokens and all(token in special_tokens for token in spec.tokens):
            return spec
    for spec in specific:
        if config.get("model_type") in spec.model_types:
            return spec
    return THINKING if any(sign in chat_template for [sign] in THINKING.signs) else PLAIN


def opens_reasoning(spec: ParserSpec, prompt: str) -> bool:
    """Whether the rendered prompt ends inside of reasoning: the template wrote the opening marker itself."""
    end = prompt.rstrip()
    return any(end.endswith(opening.rstrip()) for opening, _ in _openings(spec))


def ends_reasoning(spec: ParserSpec, prompt: str) -> bool:
    """Whether the rendered prompt ends just behind reasoning: templates write none that way."""
    end = prompt.rstrip()
    return any(end.endswith(marker) for _, channel in _openings(spec) for marker in channel.close)


def stays_in_reasoning(spec: ParserSpec, begun: str) -> bool:
    """Whether an answer that is begun so goes on inside of reasoning."""
    return any(
        begun.lstrip().startswith(opening) and not any(marker in begun for marker in channel.close)
        for opening, channel in _openings(spec)
    )


def _openings(spec: ParserSpec) -> Iterator[tuple[str, Channel]]:
    """What opens reasoning, where that is always the same."""
    for rule in spec.rules:
        for form in rule.forms:
            if isinstance(form, Channel) and form.region is Region.REASONING:
                for head in form.heads:
                    if "{" not in head:
                        yield rule.open + head, form


def spelt_tokens(spec: ParserSpec, special_tokens: Collection[str]) -> frozenset[str]:
    """The special tokens that markers are made of: these must reach the parser as text, no others."""
    text = "\0".join(_strings((spec.rules, spec.start, spec.dropped)))
    return frozenset(token for token in special_tokens if token in text)


def _strings(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _strings(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _strings(getattr(part, field.name))
