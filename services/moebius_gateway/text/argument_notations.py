"""The notations in which families write arguments, as `parsing/spec.py` describes them."""

import json
import re
from abc import abstractmethod
from typing import Any

from moebius_gateway.text.argument_grammar import ANY, ArgumentWriter, Member, Schema
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.lark import LarkWriter
from moebius_gateway.text.parsing.spec import NestedArguments, QuotedArguments, TaggedArguments
from moebius_gateway.text.parsing.templates import SLOTS
from moebius_gateway.text.tool_schema import REMARKS

KEY = re.compile(SLOTS["key"])
# Keys that need no quotes.
WORD = re.compile(r"[\w.-]{1,128}", re.ASCII)
LINE_FEED = "\n"
LINE = r"/\n?/"


def _spelt(value: Any) -> str:
    """As it stands between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class _Tags(ArgumentWriter):
    """What the two notations with tags have in common: bare strings, and keys that stand in tags."""

    bare = True

    def _writable(self, key: str) -> bool:
        return KEY.fullmatch(key) is not None and not key.startswith("/")


class TaggedWriter(_Tags):
    """Strings are bare, all else is JSON."""

    own = frozenset({"string"})

    def __init__(self, writer: LarkWriter, tool: Tool, number: int, form: TaggedArguments) -> None:
        super().__init__(writer, tool, number)
        self._form = form

    def _whole(self, schema: Schema) -> str:
        members = self._members(schema, "")
        end = self._writer.literal(self._form.end)
        if not members and schema.get("additionalProperties") is not False:
            return f"{self._any_argument()}* {end}"
        return (
            " ".join(self._argument(member) + ("" if member.required else "?") for member in members)
            + f" {end}"
        )

    def _argument(self, member: Member) -> str:
        close = self._form.close
        says_type = "{word}" in self._form.argument
        flats = self._flat(member.schema, member.key)
        ways = []
        for flat in flats:
            types = self._types(flat)
            ways += [(way, "true") for way in self._own(flat, types & self.own, close, member.key)]
            # Bare text may be anything else too, where nothing says that it is not.
            anything = "string" in types and not flat.keys() - REMARKS
            if types - self.own and not (anything and not says_type):
                ways.append((self._json(flat, types - self.own, close), "false"))
        if not ways or not (says_type or self._told_apart(flats)):
            raise self._unsupported(member.key)
        heads = {
            word: self._writer.template(self._form.argument, key=member.key, word=word) for _, word in ways
        }
        written = [f"{heads[word]} {way} {self._writer.gap}" for way, word in ways]
        return self._writer.rule(self._name("argument"), " | ".join(written))

    def _any_argument(self) -> str:
        """One of a tool that says nothing of its arguments."""
        before, _, behind = self._form.argument.partition("{key}")
        head = f"{self._writer.template(before)} {self._writer.rule('ANY_KEY', f'/{KEY.pattern}/')}"
        value = self._writer.text("any_value", self._form.close)
        return self._writer.rule(
            "any_argument", f"{head} {self._writer.template(behind, word='true')} {value} {self._writer.gap}"
        )

    def _text(self, schema: Schema, close: str, path: str) -> str:
        condition, name = self._condition(schema, path), self._name("text")
        if condition is None or not self._form.lines:
            return self._writer.text(name, close, condition)
        # The reader takes off the one and the other line feed.
        text = self._writer.text(name, f"\n{close}", condition, barred=close)
        return f"{self._writer.literal(LINE_FEED)} {text}"

    def _word(self, value: Any, close: str) -> str:
        line = LINE if self._form.lines else ""
        return f"{line} {self._writer.literal(_spelt(value))} {line} {self._writer.literal(close)}"

    def _container(self, kind: str, schema: Schema, close: str, path: str) -> str:
        raise NotImplementedError  # not its own


class _Containers(ArgumentWriter):
    own = frozenset({"string", "array", "object"})

    def _container(self, kind: str, schema: Schema, close: str, path: str) -> str:
        if kind == "array":
            items = schema.get("items", ANY)
            least, most = schema.get("minItems"), schema.get("maxItems")
            return self._array(
                ANY if items is True else items,
                least if type(least) is int else 0,
                most if type(most) is int else None,
                close,
                path,
            )
        members = self._members(schema, path)
        if not members and schema.get("additionalProperties") is not False:
            return self._any_object(schema, close, path)
        return self._object(members, close, path)

    @abstractmethod
    def _array(self, items: Any, least: int, most: int | None, close: str, path: str) -> str: ...

    @abstractmethod
    def _object(self, members: list[Member], close: str, path: str) -> str: ...

    @abstractmethod
    def _any_object(self, schema: Schema, close: str, path: str) -> str:
        """One that declares no properties."""


class NestedWriter(_Tags, _Containers):
    """Tags all the way down."""

    def __init__(self, writer: LarkWriter, tool: Tool, number: int, form: NestedArguments) -> None:
        super().__init__(writer, tool, number)
        self._form = form

    def _whole(self, schema: Schema) -> str:
        return self._object(self._members(schema, ""), self._form.mark + self._form.end, "")

    def _object(self, members: list[Member], close: str, path: str) -> str:
        written = [
            self._part(member.key, member.schema, f"{path}.{member.key}") + ("" if member.required else "?")
            for member in members
        ]
        return " ".join([*written, self._writer.gap, self._writer.literal(close)])

    def _any_object(self, schema: Schema, close: str, path: str) -> str:
        # The end of a tag of any name could not be held to its beginning.
        return self._json(schema, {"object"}, close)

    def _array(self, items: Any, least: int, most: int | None, close: str, path: str) -> str:
        part = self._part(self._form.item, items, f"{path}.items")
        parts = f"{part}{{{least},{'' if most is None else most}}}"
        return f"{parts} {self._writer.gap} {self._writer.literal(close)}"

    def _part(self, tag: str, schema: Any, path: str) -> str:
        mark = self._form.mark
        value = self._value(schema, f"{mark}</{tag}>", path)
        return self._writer.rule(
            self._name("part"), f"{self._writer.gap} {self._writer.literal(f'{mark}<{tag}>')} {value}"
        )

    def _text(self, schema: Schema, close: str, path: str) -> str:
        return self._writer.text(
            self._name("text"), close, self._condition(schema, path), barred=self._form.mark
        )

    def _word(self, value: Any, close: str) -> str:
        return f"{self._writer.literal(_spelt(value))} {self._writer.literal(close)}"


class QuotedWriter(_Containers):
    """As JSON, with other quotes."""

    bare = False

    def __init__(self, writer: LarkWriter, tool: Tool, number: int, form: QuotedArguments) -> None:
        super().__init__(writer, tool, number)
        self._quote = form.quote

    def _whole(self, schema: Schema) -> str:
        return self._container("object", schema, "", "")

    def _object(self, members: list[Member], close: str, path: str) -> str:
        """A comma stands between those that are there: what may follow each member is a rule of its own."""
        rest = '"}"'
        first: list[str] = []
        for member in reversed(members):
            value = self._value(member.schema, "", f"{path}.{member.key}")
            written = f'{self._key(member.key)} ":" {value}'
            following = self._writer.rule(self._name("rest"), rest)
            begin = f"{written} {following}"
            first = [begin] if member.required else [begin, *first]
            rest = f'"," {begin}' + ("" if member.required else f" | {following}")
        if not any(member.required for member in members):
            first.append('"}"')
        return f'"{{" ({" | ".join(first)})'

    def _any_object(self, schema: Schema, close: str, path: str) -> str:
        values = schema.get("additionalProperties", ANY)
        value = self._value(ANY if values is True else values, "", f"{path}.*")
        quote = self._writer.literal(self._quote)
        key = f"(/{WORD.pattern}/ | {quote} {self._writer.text(self._name('key'), self._quote)})"
        member = self._writer.rule(self._name("member"), f'{key} ":" {value}')
        return f'"{{" ({member} ("," {member})*)? "}}"'

    def _array(self, items: Any, least: int, most: int | None, close: str, path: str) -> str:
        item = self._value(items, "", f"{path}.items")
        if most == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" ({item} {more}){"" if least else "?"} "]"'

    def _text(self, schema: Schema, close: str, path: str) -> str:
        text = self._writer.text(self._name("text"), self._quote, self._condition(schema, path))
        return f"{self._writer.literal(self._quote)} {text}"

    def _word(self, value: Any, close: str) -> str:
        if isinstance(value, str):
            return self._writer.literal(f"{self._quote}{value}{self._quote}")
        return self._writer.literal(json.dumps(value, ensure_ascii=False))

    def _key(self, key: str) -> str:
        return self._writer.literal(key if WORD.fullmatch(key) else f"{self._quote}{key}{self._quote}")
