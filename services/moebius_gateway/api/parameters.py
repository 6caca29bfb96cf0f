"""Parameters that chat and plain completions share: their ranges, defaults and neutral values.

A parameter is honoured or refused by name. `null` is the same as leaving a parameter out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024


class Strict(BaseModel):
    """An object in which every key is known, and values are of the type that is asked for."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # Keys of OpenAI's API, or of its usual extensions, that are not supported, with values that change
    # nothing. Such a value is accepted, every other is refused.
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if value is not None}
        for name in cls.neutral.keys() & kept.keys():
            if kept.pop(name) not in cls.neutral[name]:
                raise PydanticCustomError("unsupported", "'{name}' is not supported yet", {"name": name})
        return kept


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _bias_by_id(value: Any) -> Any:
    """JSON has no integer keys."""
    if not isinstance(value, dict):
        return value
    if not all(key.isdecimal() and key.isascii() for key in value):
        raise PydanticCustomError("logit_bias", "keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


class StreamOptions(Strict):
    include_usage: bool = False
    neutral: ClassVar = {"include_obfuscation": (False,)}


class GenerationParameters(Strict):
    """How to generate, whatever the prompt."""

    model: str = Field(min_length=1, max_length=256)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)

    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
        BeforeValidator(_as_list),
        Field(max_length=MAX_STOPS),
    ] = []
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=1024)
    ignore_eos: bool = False

    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    # -1 and 0 both mean no limit.
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    # It divides logits: much smaller ones would make them infinite.
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(_bias_by_id),
        Field(max_length=1024),
    ] = {}

    # Labels that clients keep for themselves; nothing depends on them.
    user: str = ""
    safety_identifier: str = ""
    metadata: dict[str, str] = {}

    neutral: ClassVar = {
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationParameters":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options", "'stream_options' is only allowed with 'stream'", {"name": "stream_options"}
            )
        return self
