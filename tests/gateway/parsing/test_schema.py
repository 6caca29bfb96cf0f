"""Bare text becomes the value that the tool's schema means."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius_gateway.text.parsing.schema import JSON_TYPES, argument_types, typed

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "upper": {"type": "STRING"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "maybe": {"type": ["integer", "null"]},
        "nullable": {"type": "string", "nullable": True},
        "any_of": {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "string"}}]},
        "one_of": {"oneOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "all_of": {"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]},
        "reference": {"$ref": "#/$defs/Point"},
        "chain": {"$ref": "#/$defs/Chain"},
        "odd~/name": {"type": "integer"},
        "escaped": {"$ref": "#/properties/odd~0~1name"},
        "enum": {"enum": ["a", "b"]},
        "mixed": {"enum": ["a", 1, None]},
        "numbers": {"type": "number", "enum": [1, 2.5]},
        "const": {"const": 5},
        "circle": {"$ref": "#/$defs/Circle"},
        "nowhere": {"$ref": "#/$defs/Nowhere"},
        "remote": {"$ref": "https://example.com/schema"},
        "nothing": {},
        "true": True,
        "contradiction": {"type": "string", "enum": [5]},
    },
    "additionalProperties": {"type": "boolean"},
    "$defs": {
        "Point": {"type": "object", "properties": {"x": {"type": "number"}}},
        "Chain": {"$ref": "#/$defs/Point"},
        "Circle": {"$ref": "#/$defs/Circle"},
    },
}


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("text", {"string"}),
        ("upper", {"string"}),
        ("count", {"integer"}),
        ("size", {"number", "integer"}),
        ("maybe", {"integer", "null"}),
        ("nullable", {"string", "null"}),
        ("any_of", {"boolean", "array"}),
        ("one_of", {"object", "null"}),
        ("all_of", {"integer"}),
        ("reference", {"object"}),
        ("chain", {"object"}),
        ("escaped", {"integer"}),
        ("enum", {"string"}),
        ("mixed", {"string", "integer", "null"}),
        ("numbers", {"number", "integer"}),
        ("const", {"integer"}),
        ("circle", JSON_TYPES),
        ("nowhere", JSON_TYPES),
        ("remote", JSON_TYPES),
        ("nothing", JSON_TYPES),
        ("true", JSON_TYPES),
        ("contradiction", JSON_TYPES),
        ("unknown", {"boolean"}),
    ],
)
def test_types(key: str, types: set[str]) -> None:
    assert argument_types(SCHEMA, key) == types


def test_paths() -> None:
    assert argument_types(SCHEMA, "any_of", None) == {"string"}
    assert argument_types(SCHEMA, "one_of", "x") == {"number", "integer"}
    assert argument_types(SCHEMA, "chain", "x") == {"number", "integer"}
    for path in (("text", None), ("text", "x"), ("circle", "x"), ("true", "x", None, "y")):
        assert argument_types(SCHEMA, *path) == JSON_TYPES
    assert argument_types(SCHEMA) == {"object"}


def test_properties_behind_references_and_alternatives() -> None:
    definitions = {
        "A": {"properties": {"x": {"type": "integer"}}},
        "B": {"properties": {"y": {"type": "null"}}},
    }
    schema = {"anyOf": [{"$ref": "#/$defs/A"}, {"allOf": [{"$ref": "#/$defs/B"}]}], "$defs": definitions}
    assert argument_types(schema, "x") == {"integer"}
    assert argument_types(schema, "y") == {"null"}
    assert argument_types({"$ref": "#/$defs/A", "$defs": definitions}, "x") == {"integer"}


def test_schemas_that_refer_to_each_other_in_many_ways_are_looked_at_once() -> None:
    names = [f"D{i}" for i in range(30)]
    anywhere = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    schema = {"properties": {"x": anywhere}, "$defs": dict.fromkeys(names, anywhere), **anywhere}
    assert argument_types(schema, "x") == JSON_TYPES
    assert argument_types(schema, "y") == JSON_TYPES


def test_what_is_no_schema_says_nothing() -> None:
    for schema in ({}, {"properties": []}, {"properties": {"x": 5}}, {"anyOf": 5, "$ref": 5, "type": 5}):
        assert argument_types(schema, "x") == JSON_TYPES
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        deep = {"anyOf": [deep]}
    assert argument_types({"properties": {"x": deep}}, "x") == JSON_TYPES


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        (" 5\n", {"integer"}, 5),
        ("5.0", {"integer"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("1e400", {"integer"}, "1e400"),
        ("5", {"number", "integer"}, 5),
        ("-1.5e3", {"number", "integer"}, -1500.0),
        ("NaN", {"number", "integer"}, "NaN"),
        ("True", {"boolean"}, True),
        ("FALSE", {"boolean"}, False),
        ("yes", {"boolean"}, "yes"),
        ("None", {"null", "integer"}, None),
        ("None", {"null", "string"}, "None"),
        ("null", {"null", "string"}, None),
        ("null", {"string", "integer"}, "null"),
        ("5", {"string", "integer"}, 5),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ('{"a": [1]', {"object"}, '{"a": [1]'),
        ("[1]", {"object"}, "[1]"),
        ('"x"', {"object", "array"}, "x"),
        ('"x"', JSON_TYPES, '"x"'),
        ("true", JSON_TYPES, True),
        ("words", JSON_TYPES, "words"),
        ("", JSON_TYPES, ""),
        ("9" * 5000, JSON_TYPES, "9" * 5000),
        ("[" * 100_000, JSON_TYPES, "[" * 100_000),
        ("[" * 300 + "]" * 300, {"array"}, "[" * 300 + "]" * 300),
        (r'["\ud800", "\ud83d\ude42"]', {"array"}, ["\ufffd", "🙂"]),
    ],
)
def test_values(text: str, types: set[str], value: object) -> None:
    found = json.loads(typed(text, frozenset(types)))
    assert (type(found), found) == (type(value), value)


@given(st.text(), st.sets(st.sampled_from(sorted(JSON_TYPES)), min_size=1))
def test_any_text_is_some_value(text: str, types: set[str]) -> None:
    json.loads(typed(text, frozenset(types)))
