"""What a tool's JSON schema says about the types of its arguments; bare text as a value of such a type."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from moebius_gateway.text.parsing.json_scanner import JsonScanner, quoted

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
ABOUT = {
    "object": frozenset({"properties", "additionalProperties", "patternProperties", "required"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
# What nests deeper is not looked at.
MAX_DEPTH = 32


def argument_types(schema: Mapping[str, Any], *path: str | None) -> frozenset[str]:
    """The JSON types that a part of the arguments may have. All, where the schema says nothing.

    `path`: keys that lead to it; None: to the items of a list. Follows local `$ref`, `anyOf`, `oneOf`,
    `allOf`, `const`, `enum`, lists of types, `nullable` and `additionalProperties`.
    """
    types = _Types(schema)
    part: Any = schema
    for step in path:
        part = types.part(part, step, set())
    return types.of(part)


def typed(text: str, types: frozenset[str]) -> str:
    """`text` as the JSON of a value of one of `types`: as it stands if it is such JSON, else as a string.

    Python's names and floats that are whole numbers count as what they mean.
    """
    stripped = text.strip()
    word = stripped.lower()
    if word in ("true", "false") and "boolean" in types:
        return word
    if "null" in types and (word == "null" or (word == "none" and "string" not in types)):
        return "null"
    kind, value = _parsed(stripped)
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return str(int(value))
    if kind in types - {"string"} or (kind == "string" and "string" not in types):
        if kind not in ("array", "object", "string"):
            return stripped
        # What has strings is mended as JSON calls are.
        scanner = JsonScanner()
        _, mended = scanner.read(stripped, 0)
        return mended if scanner.done else quoted(text)
    return quoted(text)


def _parsed(text: str) -> tuple[str, Any]:
    """The JSON type and value of `text`; the type is "" if it is not JSON."""
    try:
        value = json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return "", None
    return type_of(value), value


def _not_json(name: str) -> NoReturn:
    raise ValueError(name)


def type_of(value: Any) -> str:
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
        (dict, "object"),
    ):
        if isinstance(value, kind):
            return name
    return "null"


class _Types:
    """Types of one schema's parts. Each part is looked at once, whatever refers to it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._seen: dict[int, frozenset[str]] = {}

    def part(self, schema: Any, step: str | None, seen: set[int], depth: int = 0) -> Any:
        """What `schema` says of a property, or (None) of the items; None if it says nothing."""
        if not isinstance(schema, Mapping) or id(schema) in seen or depth > MAX_DEPTH:
            return None
        seen.add(id(schema))
        properties = schema.get("properties")
        if step is not None and isinstance(properties, Mapping) and step in properties:
            return properties[step]
        for alternative in [self._target(schema), *_parts(schema, "allOf", "anyOf", "oneOf")]:
            found = self.part(alternative, step, seen, depth + 1)
            if found is not None:
                return found
        return schema.get("items" if step is None else "additionalProperties")

    def of(self, schema: Any, depth: int = 0) -> frozenset[str]:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
            return JSON_TYPES
        if id(schema) not in self._seen:
            self._seen[id(schema)] = JSON_TYPES  # what a cycle adds
            self._seen[id(schema)] = self._narrowed(schema, depth + 1)
        return self._seen[id(schema)]

    def _narrowed(self, schema: Mapping[str, Any], depth: int) -> frozenset[str]:
        types = declared_types(schema)
        if isinstance(schema.get("enum"), list):
            types &= frozenset(map(type_of, schema["enum"]))
        if "const" in schema:
            types &= {type_of(schema["const"])}
        for part in [self._target(schema), *_parts(schema, "allOf")]:
            types &= self.of(part, depth)
        for name in ("anyOf", "oneOf"):
            if parts := _parts(schema, name):
                types &= frozenset().union(*(self.of(part, depth) for part in parts))
        if schema.get("nullable") is True:
            types |= {"null"}
        return types or JSON_TYPES

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """What a local reference ("#/$defs/Point") points to; None if there is none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        target: Any = self._root
        for name in reference[2:].split("/"):
            if not isinstance(target, Mapping):
                return None
            target = target.get(name.replace("~1", "/").replace("~0", "~"))
        return target


def declared_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that `schema` itself names; where it names none, those that its other words are about."""
    if "type" not in schema:
        return frozenset(kind for kind, words in ABOUT.items() if words & schema.keys()) or JSON_TYPES
    declared = schema["type"]
    names = declared if isinstance(declared, list) else [declared]
    known = JSON_TYPES & {name.lower() for name in names if isinstance(name, str)}
    if "number" in known:
        known |= {"integer"}
    return known or JSON_TYPES


def _parts(schema: Mapping[str, Any], *names: str) -> list[Any]:
    return [part for name in names if isinstance(schema.get(name), list) for part in schema[name]]
