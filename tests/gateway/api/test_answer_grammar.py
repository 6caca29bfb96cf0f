"""What a grammar lets through is read by the family's parser as what was demanded, whatever is drawn."""

import json
import random
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from moebius_gateway.text.answer_grammar import Demands, answer_grammar
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.errors import UnsupportedError
from moebius_gateway.text.grammar import fault, of_choice, of_schema
from moebius_gateway.text.model import TextModel
from moebius_gateway.text.parsing.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from moebius_gateway.text.parsing.registry import by_name, names
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
from tests.tiny import EOS_TOKEN_ID, SPECIAL

WEATHER = Tool(
    "weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Köln", "Ulm"]},
            "note": {"type": "string", "maxLength": 9},
            "days": {"type": "integer", "minimum": 1, "maximum": 20},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "days", "place"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"type": "boolean"}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
)
TREE = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "pattern": "^[a-c]{2}$"},
        "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["label"],
    "additionalProperties": False,
}
PLANT = Tool(
    "plant",
    parameters={
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/tree"},
            "word": {"type": "string", "minLength": 2, "maxLength": 4},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "kind": {"anyOf": [{"$ref": "#/$defs/kind"}, {"type": "null"}]},
            "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
            "a key": {"type": "boolean"},
            "again": {"$ref": "#/properties/tree"},
        },
        "required": ["tree", "word", "maybe", "sizes"],
        "additionalProperties": False,
        "$defs": {"tree": TREE, "kind": {"enum": ["oak", "fir", 7]}},
    },
    strict=True,
)
NOW = Tool("now", parameters={"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, NOW, PLANT)
ANSWER = of_schema(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
UNENFORCED = {"plain", "think"}
ENFORCED = sorted(set(names()) - UNENFORCED)


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


@dataclass(frozen=True)
class Family:
    spec: ParserSpec
    specials: dict[str, int]
    tokenizer: LLTokenizer

    def grammar(self, demands: Demands, *, in_reasoning: bool = False) -> str:
        return answer_grammar(self.spec, self.specials, demands, in_reasoning=in_reasoning)

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


def drawn(family: Family, grammar: str, draw: random.Random, limit: int = 1500) -> str:
    """A random answer that the grammar lets through."""
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


def check(name: str, arguments: Mapping[str, Any]) -> None:
    if name == "now":
        assert arguments == {}
        return
    if name == "plant":
        jsonschema.validate(arguments, PLANT.parameters)
        return
    assert name == "weather"
    assert arguments["city"] in ("Köln", "Ulm")
    assert 1 <= arguments["days"] <= 20
    assert arguments["place"] in ({"x": True}, {"x": False})
    assert arguments.keys() <= {"city", "days", "place", "note"}
    assert isinstance(arguments.get("note", ""), str)


@pytest.mark.parametrize("in_reasoning", [False, True])
@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("name", ENFORCED)
def test_who_must_call_calls(name: str, one: bool, in_reasoning: bool) -> None:
    demands = Demands(tools=TOOLS, must_call=True, one_call=one)
    family = family_of(name)
    grammar = family.grammar(demands, in_reasoning=in_reasoning)
    draw = random.Random(f"{name}{one}{in_reasoning}")
    for _ in range(4):
        answer = drawn(family, grammar, draw)
        got = read(family, answer, TOOLS, in_reasoning=in_reasoning)
        assert got["calls"], repr(answer)
        assert got["ended"] == len(got["calls"])
        assert len(got["calls"]) == 1 or not one
        assert not got["content"].strip(), answer
        for called, arguments in got["calls"]:
            check(called, arguments)


@pytest.mark.parametrize("name", sorted(names()))
def test_what_is_said_is_of_the_schema(name: str) -> None:
    family = family_of(name)
    grammar = family.grammar(Demands(answer=ANSWER))
    draw = random.Random(name)
    for _ in range(4):
        answer = drawn(family, grammar, draw)
        got = read(family, answer, ())
        assert isinstance(json.loads(got["content"])["a"], int), answer


@pytest.mark.parametrize("name", sorted(set(ENFORCED) - {"llama3"}))
def test_strict_tools_in_free_text(name: str) -> None:
    """What stands behind the marker of a call keeps to the tools; anything may stand before."""
    family = family_of(name)
    grammar = family.grammar(Demands(tools=TOOLS))
    draw = random.Random(name)
    for _ in range(4):
        for called, arguments in read(family, drawn(family, grammar, draw), TOOLS)["calls"]:
            check(called, arguments)


def test_a_call_in_free_text_is_held_to_the_tools() -> None:
    family = family_of("hermes")
    matcher = LLMatcher(family.tokenizer, family.grammar(Demands(tools=TOOLS)))
    assert matcher.consume_tokens(family.ids("I look."))
    good = family.ids('<tool_call>{"name": "now", "arguments": {}}</tool_call> Well')
    bad = family.ids('<tool_call>{"name": "then')
    assert matcher.validate_tokens(good) == len(good)
    assert matcher.validate_tokens(bad) < len(bad)


def test_where_an_answer_has_a_channel_of_its_own_it_stays_free() -> None:
    family = family_of("harmony")
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
    for demands in (Demands(tools=TOOLS), Demands(reasoning_budget=50)):
        matcher = LLMatcher(family.tokenizer, family.grammar(demands))
        ids = family.ids(f"{thought}<|channel|>final<|message|>Sun.")
        assert matcher.consume_tokens(ids)
        assert matcher.is_accepting()
    matcher = LLMatcher(family.tokenizer, family.grammar(Demands(tools=TOOLS)))
    assert matcher.consume_tokens(family.ids(thought + call))
    assert matcher.validate_tokens(family.ids("{}")) == len(family.ids("{}"))
    assert matcher.validate_tokens(family.ids('{"a"')) < len(family.ids('{"a"'))


def test_a_schema_or_a_call() -> None:
    family = family_of("hermes")
    matcher = LLMatcher(family.tokenizer, family.grammar(Demands(answer=ANSWER, tools=TOOLS)))
    for answer, fits in [
        ('{"a": 1}', True),
        ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', True),
        ('<think>\nHm\n</think>\n\n{"a": 1}', True),
        ('{"b": 1}', False),
        ("No.", False),
    ]:
        ids = family.ids(answer)
        matcher.reset()
        assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) is fits, answer


@pytest.mark.parametrize("family", sorted(UNENFORCED))
def test_what_cannot_be_enforced_is_said(family: str) -> None:
    for demands, param in [
        (Demands(tools=TOOLS, must_call=True), "tool_choice"),
        (Demands(tools=TOOLS), "tools"),
    ]:
        with pytest.raises(UnsupportedError, match=family) as refused:
            answer_grammar(by_name(family), {}, demands, in_reasoning=False)
        assert refused.value.param == param


@pytest.mark.parametrize("family", ["glm", "minimax_m3", "gemma4"])
@pytest.mark.parametrize(
    ("place", "schema"),
    [
        ("s", {"type": "string", "format": "date"}),
        ("s", {"type": "string", "pattern": r"\bword\b"}),
        ("s.items", {"type": "array", "items": {"type": "string", "format": "date"}}),
        ("s.deep", {"type": "object", "properties": {"deep": {"type": "string", "format": "date"}}}),
        ("s", {"type": "object", "minProperties": 1}),
        ("s", {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 7}]}),
        ("a<b", True),
    ],
)
def test_conditions_that_cannot_be_enforced_are_refused_for_strict_tools(
    family: str, place: str, schema: Any
) -> None:
    name = place.partition(".")[0]
    parameters = {"type": "object", "properties": {name: schema}}
    spec = by_name(family)
    json_values = family == "glm" and schema is not True and schema.get("type") in ("array", "object")
    readable = family == "gemma4" and (schema is True or "anyOf" in schema)
    loose, strict = (
        Demands(tools=[Tool("f", parameters=parameters, strict=strict)], must_call=True)
        for strict in (False, True)
    )
    assert fault(answer_grammar(spec, {}, loose, in_reasoning=False)) is None
    if json_values or readable:
        answer_grammar(spec, {}, strict, in_reasoning=False)
        return
    with pytest.raises(UnsupportedError, match=re.escape(f"'{place}' of 'f'")):
        answer_grammar(spec, {}, strict, in_reasoning=False)


LOOSE = Tool(
    "loose",
    parameters={
        "type": "object",
        "properties": {
            "any": {},
            "object": {"type": "object"},
            "map": {"type": "object", "additionalProperties": {"type": "integer"}},
            "list": {"type": "array"},
            "mixed": {"type": ["string", "integer", "null"]},
            "word": {"type": ["string", "null"], "enum": ["a", None, 5]},
            "all": {"allOf": [{"$ref": "#/$defs/e"}]},
            "two": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2},
            "nested": {
                "properties": {"q k": {"type": "array", "items": {"enum": ["x", "y z"]}, "maxItems": 3}}
            },
            "date": {"type": "string", "format": "date"},
        },
        "required": ["nested", "list"],
        "$defs": {"e": {"enum": ["E1", "E2"]}},
    },
)
NOTATIONS = ("qwen3_coder", "glm", "minimax", "deepseek_dsml", "gemma4", "minimax_m3", "hermes", "llama3")


@pytest.mark.parametrize("name", NOTATIONS)
def test_loose_tools_are_held_to_what_can_be_enforced(name: str) -> None:
    family, draw = family_of(name), random.Random(name)
    anything = Tool("anything", parameters={})
    grammar = family.grammar(Demands(tools=(LOOSE, anything), must_call=True, one_call=True))
    for _ in range(6):
        answer = drawn(family, grammar, draw, limit=2500)
        [(called, arguments)] = read(family, answer, (LOOSE, anything))["calls"]
        assert isinstance(arguments, dict)
        if called == "loose":
            jsonschema.validate(arguments, LOOSE.parameters)


@pytest.mark.parametrize("name", NOTATIONS)
def test_references_are_from_the_root_of_the_tools_schema(name: str) -> None:
    """As several clients write them: to the root itself, and to another property."""
    family, draw = family_of(name), random.Random(name)
    list_of = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 1, "maximum": 3},
            "m": {"$ref": "#/properties/n"},
            "next": {"$ref": "#"},
        },
        "required": ["n", "m"],
        "additionalProperties": False,
    }
    tool = Tool("f", parameters=list_of, strict=True)
    grammar = family.grammar(Demands(tools=(tool,), must_call=True, one_call=True))
    nested = 0
    for _ in range(8):
        [(_, arguments)] = read(family, drawn(family, grammar, draw), (tool,))["calls"]
        jsonschema.validate(arguments, list_of)
        nested += "next" in arguments
    assert nested


@pytest.mark.parametrize("in_reasoning", [False, True])
def test_reasoning_ends_at_its_budget(in_reasoning: bool) -> None:
    family = family_of("think")
    demands = Demands(answer=of_choice(["yes", "no"]), reasoning_budget=20)
    grammar = family.grammar(demands, in_reasoning=in_reasoning)
    start = "" if in_reasoning else "<think>"

    def consumed(answer: str) -> tuple[str, bool]:
        matcher, ids = LLMatcher(family.tokenizer, grammar), family.ids(answer)
        return family.text(ids[: matcher.try_consume_tokens(ids)]), matcher.is_accepting()

    for thought in ("Hm", "a < b", "</thin ", "<</p></th>", ""):
        whole = f"{start}{thought}</think>\n\nyes"
        assert consumed(whole) == (whole, True)
    long = f"{start}{'x' * 100}"
    assert 15 < len(consumed(long)[0]) - len(start) <= 25
    assert consumed(f"{consumed(long)[0]}</think>no")[1]
    if not in_reasoning:
        assert consumed("yes") == ("", False), "a limit is of no use if there need be no reasoning"


def test_special_tokens_are_ids_to_the_sampler() -> None:
    """No text that the sampler sees can spell them."""
    family = family_of("harmony")
    grammar = family.grammar(Demands(answer=of_choice(["yes"]), reasoning_budget=20))
    matcher = LLMatcher(family.tokenizer, grammar)
    answer = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert matcher.consume_tokens(family.ids(answer))
    assert matcher.is_accepting()
    assert set(TextModel(tokenizer_files()).special_tokens) == set(SPECIAL)
