"""Structured output in OpenAI's words and in those that serving engines share."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import Field, model_validator

from moebius_gateway.api.body import MAX_NESTING, nesting
from moebius_gateway.api.errors import invalid
from moebius_gateway.api.strict import Many, Strict, refuse
from moebius_gateway.text.grammar import (
    GrammarError,
    Part,
    Wanted,
    of_choice,
    of_grammar,
    of_regex,
    of_schema,
)

ANY_OBJECT = {"type": "object"}


class JsonSchema(Strict):
    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(ANY_OBJECT, alias="schema")
    # Kept to in either case.
    strict: bool = False


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise refuse("json_schema", "goes with 'type': 'json_schema', and with no other")
        return self

    def wanted(self, param: str) -> list[Wanted]:
        match self.type:
            case "text":
                return []
            case "json_object":
                return [Wanted(of_schema(ANY_OBJECT), param)]
        assert self.json_schema is not None
        return [Wanted(of_schema(self.json_schema.schema_), f"{param}.json_schema.schema")]


class StructuredOutputs(Strict):
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = Field(None, min_length=1)
    choice: Many[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1)
    neutral: ClassVar = {
        "disable_fallback": (True,),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
        "structural_tag": (),
    }

    def wanted(self) -> list[Wanted]:
        asked = {
            "json": ("json", self.json_),
            "json_object": ("json", ANY_OBJECT if self.json_object else None),
            "regex": ("regex", self.regex),
            "choice": ("choice", self.choice),
            "grammar": ("grammar", self.grammar),
        }
        return wanted_by({f"structured_outputs.{name}": value for name, value in asked.items()})


def wanted_by(asked: Mapping[str, tuple[str, Any]]) -> list[Wanted]:
    """`asked`: parameter to kind of grammar and value. Those whose value is None are left out."""
    return [
        Wanted(_part(kind, value, param), param)
        for param, (kind, value) in asked.items()
        if value is not None
    ]


def the_one(wanted: list[Wanted]) -> Wanted | None:
    """Raises `ApiError` if there are several: an answer can keep to one only."""
    if len(wanted) > 1:
        names = " and ".join(f"'{one.param}'" for one in wanted)
        raise invalid(f"only one of {names} can be kept to", wanted[1].param)
    return wanted[0] if wanted else None


def _part(kind: str, value: Any, param: str) -> Part:
    try:
        match kind:
            case "json":
                return of_schema(_schema(value, param))
            case "regex":
                return of_regex(value)
            case "choice":
                return of_choice(value)
        return of_grammar(value)
    except GrammarError as error:
        raise invalid(f"invalid value for '{param}': {error}", param) from error


def _schema(value: Any, param: str) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise invalid(f"invalid value for '{param}': not JSON: {error}", param) from error
    if not isinstance(value, dict):
        raise invalid(f"invalid value for '{param}': a JSON schema is an object", param)
    if nesting(value) > MAX_NESTING:
        raise invalid(f"'{param}' is nested deeper than {MAX_NESTING}", param)
    return value
