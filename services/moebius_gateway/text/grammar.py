"""What an answer must spell: grammars for llguidance, written and checked before a request is admitted.

The gateway composes one grammar of all that an answer must keep to (reasoning first, then calls, then a
schema); the worker's sampler enforces it and knows nothing of what it is made of.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

# A grammar of llguidance's list: {"lark_grammar": ...} or {"json_schema": ...}.
Part = Mapping[str, Any]

MAX_CHARACTERS = 256 << 10
# Between values of JSON: enough for indented text, and an end for models that would go on for ever.
WHITESPACE = r"[ \t\n\r]{0,64}"
ANY_TEXT = r"/(.|\n)*/"
# Seconds in which parts of a schema are looked at, to say which of them is to blame.
LOOK_SECONDS = 0.5
# Expressions that the lexer may need to begin with. Of what clients send in earnest, lists of some thousand
# words need a tenth; nested repetitions, as (a{1000}){1000}, need millions, and seconds. The worker's limit
# is the same (engine/grammar/matcher.py).
LEXER_FUEL = 200_000
# So many bytes of an answer are followed to see whether a grammar can be.
PROBED_BYTES = 8
# What the library says where an answer can neither go on nor end.
NOTHING_MAY_COME = "NoExtensionBias"
# Characters of what the library says; it repeats the grammar.
MAX_MESSAGE = 400
ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
MANY = ("anyOf", "allOf", "oneOf", "prefixItems")
# Definitions first: what refers to a faulty one is not to blame.
NAMED = ("$defs", "definitions", "properties", "patternProperties")


class GrammarError(Exception):
    """The library cannot enforce it. `where`: which part of a schema is to blame, "" for the whole."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


@dataclass(frozen=True, slots=True)
class Wanted:
    """A grammar that a client asks for; `param` is the parameter that says so."""

    part: Part
    param: str


def of_schema(schema: Mapping[str, Any]) -> Part:
    """Any value that the JSON schema allows."""
    return {"json_schema": {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}}


def of_regex(pattern: str) -> Part:
    return {"lark_grammar": f"start: /{regex_to_lark(pattern)}/"}


def of_choice(choices: Sequence[str]) -> Part:
    # A terminal: the library's parser takes a few thousand alternatives, its lexer any number.
    return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, choices))}


def of_grammar(text: str) -> Part:
    """Of Lark or GBNF, told apart by their look."""
    _check_length(text)
    try:
        return {"lark_grammar": any_to_lark(text)}
    except Exception as error:  # the converter raises nothing narrower
        raise GrammarError(f"the grammar is neither Lark nor GBNF: {error}") from error


def quoted(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def escaped(text: str) -> str:
    """`text` for the inside of a regular expression of Lark."""
    return re.sub(r"[][.+*?()|{}^$/\\]", lambda match: "\\" + match[0], text).replace("\n", r"\n")


def composed(lark: str, parts: Mapping[str, Part]) -> str:
    """A grammar whose start is `lark`'s, in which `@name` stands for each of `parts`."""
    grammars = [{"name": "answer", "lark_grammar": lark}]
    grammars += [{"name": name} | dict(part) for name, part in parts.items()]
    return orjson.dumps({"grammars": grammars}).decode()


def check(part: Part) -> None:
    """Raises `GrammarError` if the library cannot enforce `part`. Takes milliseconds; more for large ones."""
    _check_length(orjson.dumps(part))
    written = orjson.dumps({"grammars": [part]}).decode()
    message = fault(written)
    if message is None:
        if (trouble := _trouble_of_following(written)) is not None:
            raise GrammarError(trouble)
        return
    if "json_schema" not in part:
        raise GrammarError(message)
    schema = part["json_schema"]
    where, culprit = "", schema
    deadline = time.monotonic() + LOOK_SECONDS
    while (found := _faulty_child(schema, culprit, deadline)) is not None:
        step, culprit, message = found
        where += step
    raise GrammarError(message, where)


def enforceable(part: Part) -> bool:
    """Whether the library can enforce `part`."""
    written = orjson.dumps({"grammars": [part]}).decode()
    return len(written) <= MAX_CHARACTERS and fault(written) is None


def fault(grammar: str) -> str | None:
    """What is wrong with a whole grammar, in the library's words."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed:
        return None
    message = messages[0].strip()
    if len(message) <= MAX_MESSAGE:
        return message
    # Without the grammar that it repeats, if that can be told.
    reasons = [line for line in message.splitlines() if line.startswith("error: ")]
    return ("; ".join(reasons) or message)[:MAX_MESSAGE]


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _trouble_of_following(grammar: str) -> str | None:
    """Follows an answer of the first byte that may come each time. A grammar that has no fault otherwise."""
    limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
    matcher = LLMatcher(_bytes(), grammar, log_level=0, limits=limits)
    for _ in range(PROBED_BYTES):
        # A byte for each token, 0 where it may not come.
        mask = matcher.compute_logit_bias()
        token = next((token for token, allowed in enumerate(mask) if allowed), None)
        if token is None or matcher.is_stopped():
            break
        matcher.consume_token(token)
    if not matcher.is_error():
        return None
    if matcher.get_error().startswith(NOTHING_MAY_COME):
        return "no answer satisfies it"
    return "it takes too much to follow: repeat less, above all what repeats itself"


def _check_length(text: str | bytes) -> None:
    if len(text) > MAX_CHARACTERS:
        raise GrammarError(f"it is longer than {MAX_CHARACTERS} characters")


def _faulty_child(root: Any, schema: Any, deadline: float) -> tuple[str, Any, str] | None:
    """The first part of `schema` that is wrong by itself: its place, itself, what is wrong."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    for step, child in _children(schema):
        if time.monotonic() > deadline:
            return None
        # A list of definitions would blame this child for faults of its sisters.
        alone = {**definitions, **child} if "$ref" in orjson.dumps(child).decode() else child
        if (message := fault(orjson.dumps({"grammars": [{"json_schema": alone}]}).decode())) is not None:
            return step, child, message
    return None


def _children(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(schema, dict):
        return
    readers: Sequence[tuple[Sequence[str], Callable[[Any], Any]]] = (
        (NAMED, lambda value: value.items() if isinstance(value, dict) else ()),
        (MANY, lambda value: enumerate(value) if isinstance(value, list) else ()),
        (ONE, lambda value: (("", value),)),
    )
    for keys, members in readers:
        for key in keys:
            for name, child in members(schema.get(key)):
                if isinstance(child, dict):
                    yield (
                        (f".{key}" + (f"[{name}]" if isinstance(name, int) else f".{name}" if name else "")),
                        child,
                    )
