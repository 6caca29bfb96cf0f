"""Arguments in every family's notation: held to the tool's schema, or refused."""

import random
import re
from typing import Any

import jsonschema
import pytest

from moebius_gateway.text.answer_grammar import Demands, answer_grammar
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.errors import UnsupportedError
from moebius_gateway.text.grammar import fault
from moebius_gateway.text.parsing.registry import by_name
from tests.gateway.api.drawing import drawn, family_of, read


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
