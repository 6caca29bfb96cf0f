"""Draws random answers that a family's grammar lets through, and reads them as the gateway does."""

import json
import random
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from moebius_gateway.text.answer_grammar import Demands, answer_grammar
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.grammar import fault
from moebius_gateway.text.parsing.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from moebius_gateway.text.parsing.registry import by_name
from moebius_gateway.text.parsing.spec import (
    Channel,
    NamedCall,
    NestedArguments,
    ParserSpec,
    QuotedArguments,
    TaggedArguments,
)
from moebius_gateway.text.parsing.stream import parser_for
from tests.gateway.http_server import tokenizer_files
from tests.tiny import EOS_TOKEN_ID

# Markers that are special tokens in the checkpoints of a family: text cannot spell them.
SPECIALS = {
    "gemma4": ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    "minimax_m3": ("]<]minimax[>[",),
    "harmony": (
        *("<|channel|>", "<|message|>", "<|constrain|>"),
        *("<|start|>", "<|end|>", "<|return|>", "<|call|>"),
    ),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
}
WHITE = (" ", "\t", "\n")


@dataclass(frozen=True)
class Family:
    spec: ParserSpec
    specials: dict[str, int]
    tokenizer: LLTokenizer

    def grammar(self, demands: Demands, *, in_reasoning: bool = False, reasoned: bool = False) -> str:
        return answer_grammar(self.spec, self.specials, demands, in_reasoning=in_reasoning, reasoned=reasoned)

    def ids(self, text: str) -> list[int]:
        pieces = (
            re.split("(" + "|".join(map(re.escape, self.specials)) + ")", text) if self.specials else [text]
        )
        found = []
        for piece in pieces:
            found += [self.specials[piece]] if piece in self.specials else self.tokenizer.tokenize_str(piece)
        return found

    def text(self, ids: Sequence[int]) -> str:
        spelt = {token_id: text.encode() for text, token_id in self.specials.items()}
        pieces = [spelt.get(i) or bytes(self.tokenizer.decode_bytes([i])) for i in ids]
        return b"".join(pieces).decode("utf-8", "replace")


@cache
def family_of(name: str) -> Family:
    tokenizer = Tokenizer.from_buffer(tokenizer_files()["tokenizer.json"])
    tokenizer.add_special_tokens([*SPECIALS.get(name, ())])
    specials = {text: tokenizer.token_to_id(text) for text in SPECIALS.get(name, ())}
    spec = by_name(name)
    if name == "mistral":  # of its two ways to think each ends with the other's marker too
        spec = replace(spec, rules=tuple(rule for rule in spec.rules if rule.open != "<think>"))
    return Family(spec, specials, LLTokenizer(tokenizer.to_str(), eos_token=EOS_TOKEN_ID))


def ends_of(spec: ParserSpec) -> list[str]:
    """What ends free text; drawn characters alone would never spell it."""
    ends = [text for rule in spec.rules for text in (rule.open, *rule.close)]
    for form in (form for rule in spec.rules for form in rule.forms):
        if isinstance(form, Channel):
            ends += form.close or spec.dropped
        elif isinstance(form, NamedCall):
            ends += [form.arguments.close] if isinstance(form.arguments, TaggedArguments) else []
            ends += [form.arguments.quote] if isinstance(form.arguments, QuotedArguments) else []
            ends += [form.arguments.mark] if isinstance(form.arguments, NestedArguments) else []
    return ends


def drawn(
    family: Family, grammar: str, draw: random.Random, limit: int = 1500, *, spaced: bool = False
) -> str:
    """A random answer that the grammar lets through; `spaced`: with all the white space that it can have."""
    assert fault(grammar) is None, fault(grammar)
    matcher = LLMatcher(family.tokenizer, grammar)
    ends = [family.ids(end) for end in [*ends_of(family.spec), '"']]
    ids: list[int] = []
    while not matcher.is_stopped():
        assert len(ids) < limit, family.text(ids)
        mask = matcher.compute_bitmask()
        words = struct.unpack(f"<{len(mask) // 4}I", mask)
        allowed = [i for i in range(family.tokenizer.vocab_size) if words[i // 32] >> (i % 32) & 1]
        others = [i for i in allowed if i != EOS_TOKEN_ID]
        if not others or (len(others) < len(allowed) and draw.random() < 0.3):
            break
        if spaced and (white := [i for i in others if family.text([i]) in WHITE]):
            ids.append(draw.choice(white))
            assert matcher.consume_token(ids[-1]), matcher.get_error()
            continue
        # White space is let through in many places, and says nothing.
        words_first = sorted(
            draw.sample(others, min(4, len(others))), key=lambda i: family.text([i]).isspace()
        )
        tried = draw.sample(ends, len(ends)) if len(ids) > limit // 4 else [draw.choice(ends)]
        fitting = [end for end in tried if matcher.validate_tokens(end) == len(end)]
        chosen = fitting[0] if fitting and draw.random() < 0.5 else words_first[:1]
        assert matcher.consume_tokens(chosen), matcher.get_error()
        ids += chosen
    return family.text(ids)


def read(family: Family, answer: str, tools: Sequence[Tool], *, in_reasoning: bool = False) -> dict[str, Any]:
    parser = parser_for(
        family.spec, {tool.name: tool.parameters for tool in tools}, started_in_reasoning=in_reasoning
    )
    calls: list[list[str]] = []
    read: dict[str, Any] = {"reasoning": "", "content": "", "ended": 0}
    for event in [*parser.feed(answer), *parser.finish(truncated=False)]:
        match event:
            case ContentDelta(said):
                read["content"] += said
            case ReasoningDelta(thought):
                read["reasoning"] += thought
            case ToolCallStart(_, _, name):
                calls.append([name, ""])
            case ToolCallArguments(index, delta):
                calls[index][1] += delta
            case ToolCallEnd():
                read["ended"] += 1
    return read | {"calls": [(name, json.loads(arguments)) for name, arguments in calls]}
