"""What can be enforced of a tool's parameters, and how they stand in a schema that they are a part of."""

from collections.abc import Mapping
from typing import Any

from moebius_gateway.text.grammar import enforceable, of_schema

# What a schema may say of a value beyond its type without a condition on it.
REMARKS = frozenset(
    ("type", "title", "description", "default", "examples", "deprecated", "$defs", "definitions", "$schema")
)
# Values, in which nothing is a schema.
VALUES = frozenset({"const", "enum", "default", "examples"})


def rebased(schema: Any, pointer: str) -> Any:
    """A copy whose references, which are from its own root, are from one in which it stands at `pointer`."""
    if isinstance(schema, list):
        return [rebased(part, pointer) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: pointer + part.removeprefix("#")
        if key == "$ref" and isinstance(part, str) and part.startswith("#")
        else part
        if key in VALUES
        else rebased(part, pointer)
        for key, part in schema.items()
    }


def loosened(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """As much of a tool's parameters as can be enforced."""
    whole = {"type": "object", **parameters}
    if enforceable(of_schema(whole)):
        return whole
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    properties = {
        key: schema if enforceable(of_schema({**definitions, **_object(schema)})) else {}
        for key, schema in _object(parameters.get("properties")).items()
    }
    loose = {"type": "object", "properties": properties, "required": parameters.get("required", [])}
    for less in ({**loose, **definitions}, loose):
        if enforceable(of_schema(less)):
            return less
    return {"type": "object"}


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
