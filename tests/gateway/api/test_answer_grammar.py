"""What a grammar lets through is read by the family's parser as what was demanded, whatever is drawn."""

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from moebius_gateway.text.answer_grammar import Demands, answer_grammar
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.errors import UnsupportedError
from moebius_gateway.text.grammar import of_choice, of_schema
from moebius_gateway.text.model import TextModel
from moebius_gateway.text.parsing.registry import by_name, names
from tests.gateway.api.drawing import drawn, family_of, read
from tests.gateway.http_server import tokenizer_files
from tests.tiny import SPECIAL

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
PLACE = Tool("place", parameters=WEATHER.parameters["$defs"]["place"])
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


@pytest.mark.parametrize("tools", [(NOW,), (NOW, PLACE)])
@pytest.mark.parametrize("name", ENFORCED)
def test_a_call_with_all_the_white_space_that_it_can_have_is_one(name: str, tools: tuple[Tool, ...]) -> None:
    """Several tools let more of it through than one does."""
    family = family_of(name)
    grammar = family.grammar(Demands(tools=tools, must_call=True, one_call=True), reasoned=True)
    answer = drawn(family, grammar, random.Random(name), spaced=True)
    got = read(family, answer, tools)
    assert (len(got["calls"]), got["ended"], got["content"].strip()) == (1, 1, ""), repr(answer)


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
