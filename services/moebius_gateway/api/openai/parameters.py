"""Parameters that chat and plain completions share: their ranges, defaults and neutral values."""

from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moebius_gateway.api.openai.structured import StructuredOutputs, wanted_by
from moebius_gateway.api.request import SamplingWishes
from moebius_gateway.api.strict import Checked, Many, Strict, refuse
from moebius_gateway.text.grammar import Wanted

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_ID_DIGITS = 19
MAX_LABELS = 64
LABEL = "a label; nothing depends on it"
LABELS = f"at most {MAX_LABELS} keys; labels: nothing depends on them"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _few(value: Any, most: int) -> Any:
    """Before any of them is looked at."""
    if isinstance(value, dict) and len(value) > most:
        raise PydanticCustomError("too_long", "at most {most} keys", {"most": most})
    return value


def _bias_by_id(value: Any) -> Any:
    """JSON has no integer keys."""
    if not isinstance(_few(value, MAX_BIASES), dict):
        return value
    if not all(key.isdecimal() and key.isascii() and len(key) <= MAX_ID_DIGITS for key in value):
        raise PydanticCustomError("logit_bias", "keys must be token ids")
    return {int(key): bias for key, bias in value.items()}


Labels = Annotated[
    dict[str, str], Field(max_length=MAX_LABELS), BeforeValidator(partial(_few, most=MAX_LABELS))
]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
_Stops = Annotated[Checked[_Stop], Field(max_length=MAX_STOPS)]
Stops = Annotated[_Stops, BeforeValidator(_as_list, json_schema_input_type=_Stop | _Stops)]

_Bias = Annotated[float, Field(ge=-100, le=100)]
_TokenId = Annotated[str, Field(pattern="^[0-9]+$")]
Biases = Annotated[
    Annotated[dict[int, _Bias], Field(max_length=MAX_BIASES)],
    BeforeValidator(
        _bias_by_id,
        json_schema_input_type=Annotated[dict[_TokenId, _Bias], Field(max_length=MAX_BIASES)],
    ),
]


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    neutral: ClassVar = {"include_obfuscation": (False,)}

    @model_validator(mode="after")
    def _usage_is_wanted(self) -> "StreamOptions":
        if self.continuous_usage_stats and not self.include_usage:
            raise refuse("continuous_usage_stats", "needs 'include_usage': true")
        return self


class GenerationParameters(Strict):
    """How to generate, whatever the prompt."""

    model: str = Field(min_length=1, max_length=256, description="one of `/v1/models`; 404 otherwise")
    stream: bool = False
    stream_options: StreamOptions | None = Field(
        None,
        description="`include_usage`: usage comes in a last chunk without choices; "
        "`continuous_usage_stats`: and in every other, of its choice until then",
    )
    n: int = Field(
        1, ge=1, le=MAX_CHOICES, description="choice `i` has a seed of its own, derived from `seed`"
    )

    max_tokens: int | None = Field(
        None, ge=1, description="a limit: what does not fit behind the prompt is cut off it"
    )
    min_tokens: int = Field(0, ge=0, description="no stop before; not above `max_tokens`")
    stop: Stops = Field([], description="up to 16 strings, matched across tokens, not delivered")
    stop_token_ids: Checked[Annotated[int, Field(ge=0)]] = Field([], max_length=1024)
    ignore_eos: bool = False

    seed: int | None = Field(None, ge=-(2**63), le=2**64 - 1, description="64 bits; same seed, same draws")
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        description="0 is greedy; left out: the checkpoint's `generation_config.json`, else 1",
    )
    top_p: float | None = Field(None, gt=0, le=1, description="left out: as for `temperature`")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="-1 and 0: no limit")
    min_p: float | None = Field(None, ge=0, le=1)
    # It divides logits: much smaller ones would make them infinite.
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Biases = Field({}, description="-100 to 100, by token id")

    guided_json: dict[str, Any] | str | None = Field(None, description="a JSON schema")
    guided_regex: str | None = Field(None, min_length=1, description="in Rust's syntax")
    guided_choice: Many[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1, description="Lark or GBNF")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="`json`, `json_object`, `regex`, `choice` or `grammar`: the same under one name"
    )

    user: str = Field("", description=LABEL)
    safety_identifier: str = Field("", description=LABEL)
    prompt_cache_key: str = Field("", description=LABEL)
    metadata: Labels = Field({}, description=LABELS)

    neutral: ClassVar = {
        "best_of": (1,),
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "skip_special_tokens": (True,),
        "spaces_between_special_tokens": (True,),
        "include_stop_str_in_output": (False,),
        "prompt_logprobs": (),
        "truncate_prompt_tokens": (),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationParameters":
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "'stream_options' is only allowed with 'stream'")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self) -> SamplingWishes:
        return SamplingWishes(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            logit_bias=self.logit_bias,
        )

    def guided(self) -> list[Wanted]:
        """The grammars that the extensions ask for."""
        direct = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        wanted = wanted_by({f"guided_{kind}": (kind, value) for kind, value in direct.items()})
        return wanted + (self.structured_outputs.wanted() if self.structured_outputs is not None else [])
