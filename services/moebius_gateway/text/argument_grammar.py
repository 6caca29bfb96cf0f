"""The grammar of arguments that are not JSON: a tool's schema, written in a family's notation.

What is written is some of what the schema allows, never more if the tool is strict: properties come in their
order, and none that are not declared where some are.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from llguidance import regex_to_lark

from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.errors import UnsupportedError
from moebius_gateway.text.grammar import composed, enforceable, fault, of_schema
from moebius_gateway.text.lark import LarkWriter
from moebius_gateway.text.parsing.json_scanner import quoted
from moebius_gateway.text.parsing.schema import declared_types, type_of, typed
from moebius_gateway.text.tool_schema import REMARKS, rebased

Schema = Mapping[str, Any]

# What is understood of values, by their type. Conditions on numbers are the library's business.
NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
UNDERSTOOD: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "number": NUMBERS,
    "integer": NUMBERS,
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
ANY: Schema = MappingProxyType({})
ALWAYS = REMARKS | {"enum", "const", "nullable"}
ANYTHING = "(.|\\n)*"
REPEATS = (("anyOf", None), ("oneOf", None), ("allOf", 1))


class Member(NamedTuple):
    key: str
    schema: Any
    required: bool


class ArgumentWriter(ABC):
    """Writes one tool's arguments."""

    # Types that the notation writes by itself; values of others are JSON.
    own: frozenset[str]
    # Strings stand without quotes.
    bare: bool

    def __init__(self, writer: LarkWriter, tool: Tool, number: int) -> None:
        """`number` tells the tool's rules from those of others."""
        self._writer = writer
        self._tool = tool
        self._number = number
        self._names = 0
        # Of a part of the schema and what closes its value.
        self._rules: dict[tuple[int, str], str] = {}

    def arguments(self) -> str:
        """All of them. Raises `UnsupportedError`."""
        flats = [flat for flat in self._flat(self._tool.parameters, "") if "object" in self._types(flat)]
        if not flats:
            raise self._unsupported("")
        return f"({' | '.join(self._whole(flat) for flat in flats)})"

    # ---- what a notation is -------------------------------------------------------------------------

    @abstractmethod
    def _whole(self, schema: Schema) -> str:
        """The object that all arguments are, with its end."""

    @abstractmethod
    def _text(self, schema: Schema, close: str, path: str) -> str:
        """A string with `close` behind it."""

    @abstractmethod
    def _word(self, value: Any, close: str) -> str:
        """One value with `close` behind it."""

    @abstractmethod
    def _container(self, kind: str, schema: Schema, close: str, path: str) -> str:
        """An array or object with `close` behind it."""

    # ---- any schema ---------------------------------------------------------------------------------

    def _value(self, schema: Any, close: str, path: str) -> str:
        """A rule for a value with `close` behind it."""
        key = id(schema), close
        if key not in self._rules:
            # Entered before it is written, since it may contain itself.
            name = self._rules[key] = self._name("value")
            flats = self._flat(schema, path)
            ways = [way for flat in flats for way in self._ways(flat, close, path)]
            if not ways or not self._told_apart(flats):
                raise self._unsupported(path)
            self._writer.rule(name, " | ".join(ways))
        return self._rules[key]

    def _ways(self, schema: Schema, close: str, path: str) -> Iterator[str]:
        """How to write a value of one alternative: one way for each type that it may have."""
        types = self._types(schema)
        yield from self._own(schema, types & self.own, close, path)
        if others := types - self.own:
            yield self._json(schema, others, close)

    def _own(self, schema: Schema, types: Iterable[str], close: str, path: str) -> Iterator[str]:
        if (words := _words(schema)) is not None:
            yield from (self._word(word, close) for word in words if type_of(word) in types)
            return
        for kind in sorted(types):
            yield (
                self._text(schema, close, path)
                if kind == "string"
                else self._container(kind, schema, close, path)
            )

    def _json(self, schema: Schema, types: Iterable[str], close: str) -> str:
        """A value of these types in JSON."""
        plain: dict[str, Any] = {"type": sorted(types)}
        if (words := _words(schema)) is not None:
            plain = {"enum": [word for word in words if type_of(word) in types]}
        wanted = rebased({k: v for k, v in schema.items() if k not in ALWAYS}, "#/$defs/tool") | plain
        if b'"$ref"' in orjson.dumps(wanted):
            wanted["$defs"] = {"tool": rebased(self._tool.parameters, "#/$defs/tool")}
        if not self._tool.strict and not enforceable(of_schema(wanted)):
            wanted = plain
        part = self._writer.part(self._name("json"), of_schema(wanted))
        gap = self._writer.gap
        return f"{gap} {part} {gap} {self._writer.literal(close)}"

    def _members(self, schema: Schema, path: str) -> list[Member]:
        """An object's declared properties that can be written."""
        properties = schema.get("properties")
        required = schema.get("required")
        required = required if isinstance(required, list) else []
        members = []
        for key, value in (properties if isinstance(properties, dict) else {}).items():
            if self._writable(key):
                members.append(Member(key, value, key in required))
            elif key in required or self._tool.strict:
                raise self._unsupported(f"{path}.{key}")
        return members

    def _condition(self, schema: Schema, path: str) -> str | None:
        """What a string must be, as an expression for a terminal; None: anything."""
        conditions = []
        if "minLength" in schema or "maxLength" in schema:
            conditions.append(f"(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}")
        if "pattern" in schema:
            conditions.append(regex_to_lark(_pattern(str(schema["pattern"]))))
        kept = []
        for written in (f"/{one}/" for one in conditions):
            if fault(composed(f"start: T\nT: {written}", {})) is None:
                kept.append(written)
            elif self._tool.strict:
                raise self._unsupported(path)
        return " & ".join(kept) or None

    def _told_apart(self, alternatives: Sequence[Schema]) -> bool:
        """Bare text that is meant as a string may read as a number: no condition may depend on it."""
        types = frozenset[str]().union(*map(self._types, alternatives))
        if not (self.bare and self._tool.strict and "string" in types and types - {"string", "null"}):
            return True
        for one in alternatives:
            words = [word for word in _words(one) or () if isinstance(word, str)]
            if any(typed(word, types) != quoted(word) for word in words):
                return False
            if not words and one.keys() - REMARKS:
                return False
        return True

    def _writable(self, key: str) -> bool:
        return bool(key)

    def _flat(self, schema: Any, path: str) -> list[Schema]:
        """The alternatives of a schema: without references to others, and without alternatives."""
        found: list[Schema] = []
        waiting, seen = [schema], set[int]()
        while waiting:
            part = waiting.pop(0)
            if id(part) in seen or part is False:
                continue
            seen.add(id(part))
            part = part if isinstance(part, Mapping) else ANY
            conditions = part.keys() - REMARKS
            if conditions == {"$ref"}:
                waiting.insert(0, self._target(part["$ref"]))
                continue
            for name, length in REPEATS:
                parts = part.get(name)
                if conditions == {name} and isinstance(parts, list) and length in (None, len(parts)):
                    waiting = [*parts, *waiting]
                    break
            else:
                self._check(part, path)
                found.append(part)
        return found

    def _target(self, reference: Any) -> Any:
        target: Any = self._tool.parameters
        for name in str(reference).removeprefix("#").split("/")[1:]:
            target = (
                target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else ANY
            )
        return target

    def _check(self, schema: Schema, path: str) -> None:
        """A strict tool's conditions must all be understood."""
        types = self._types(schema)
        understood = ALWAYS.union(*(UNDERSTOOD[kind] for kind in types))
        if self._tool.strict and types & self.own and not schema.keys() <= understood:
            raise self._unsupported(path)

    def _types(self, schema: Schema) -> frozenset[str]:
        types = declared_types(schema)
        if schema.get("nullable") is True:
            types |= {"null"}
        words = _words(schema)
        return types if words is None else types & {type_of(word) for word in words}

    def _name(self, what: str) -> str:
        self._names += 1
        return f"{what}_{self._number}_{self._names}"

    def _unsupported(self, path: str) -> UnsupportedError:
        what = f"'{path.removeprefix('.')}' of '{self._tool.name}'" if path else f"'{self._tool.name}'"
        return UnsupportedError(
            f"{what} has conditions that cannot be enforced in this model's format of calls", "tools"
        )


def _words(schema: Schema) -> list[Any] | None:
    """The values that it names, if it does."""
    if "const" in schema:
        return [schema["const"]]
    words = schema.get("enum")
    return words if isinstance(words, list) else None


def _pattern(pattern: str) -> str:
    """For a whole string, what a schema's pattern says of some part of it."""
    begun = pattern.startswith("^")
    ended = re.search(r"(?<!\\)(\\\\)*\$\Z", pattern) is not None
    inner = pattern[begun : len(pattern) - ended]
    return f"{'' if begun else ANYTHING}(?:{inner}){'' if ended else ANYTHING}"
