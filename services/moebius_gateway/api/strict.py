"""Bodies of requests: every key is honoured or refused by name; `null` is the same as leaving it out."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

T = TypeVar("T")
# Of a large list every part that is wrong would be an error of its own: gigabytes of them, and minutes.
Checked = Annotated[list[T], Field(fail_fast=True)]
Many = Annotated[Checked[T], Field(max_length=32768)]

# Values that change nothing, whatever they are: labels that clients keep for themselves.
ANYTHING = object()


class Strict(BaseModel):
    """An object in which every key is known, and values are of the type that is asked for."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    # Keys of the API that are not supported, with values that change nothing. Such a value is accepted,
    # every other is refused.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if value is not None}
        if (unknown := next((name for name in kept if name not in _known(cls)), None)) is not None:
            raise PydanticCustomError("extra_forbidden", "unknown parameter", {"name": unknown})
        for name in cls.neutral.keys() & kept.keys():
            accepted, value = cls.neutral[name], kept.pop(name)
            if ANYTHING not in accepted and not any(_same(value, one) for one in accepted):
                raise PydanticCustomError("unsupported", "'{name}' is not supported", {"name": name})
        return kept


@cache
def _known(cls: type[Strict]) -> frozenset[str]:
    """The keys that it may have."""
    return frozenset(field.alias or name for name, field in cls.model_fields.items()).union(cls.neutral)


def _same(value: Any, other: Any) -> bool:
    """As JSON has it: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def refuse(name: str, message: str) -> PydanticCustomError:
    """An error of a check over several keys, about the one called `name`."""
    return PydanticCustomError("refused", message.replace("{", "{{").replace("}", "}}"), {"name": name})
