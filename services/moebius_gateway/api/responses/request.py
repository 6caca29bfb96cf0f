"""The body of POST /v1/responses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from moebius_gateway.api.openai.chat_request import Effort
from moebius_gateway.api.openai.messages import ToolName, check_names
from moebius_gateway.api.openai.parameters import LABEL, LABELS, Labels
from moebius_gateway.api.openai.structured import ANY_OBJECT
from moebius_gateway.api.openai.tool_choice import tool_choice
from moebius_gateway.api.request import GenerationRequest, SamplingWishes
from moebius_gateway.api.responses.items import InputItem, conversation_messages, decodable
from moebius_gateway.api.strict import ANYTHING, Many, Strict, refuse
from moebius_gateway.text.conversation import Conversation, Message
from moebius_gateway.text.conversation import Tool as OfferedTool
from moebius_gateway.text.grammar import Wanted, of_schema

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FunctionTool(Strict):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] = Field({})
    strict: bool = False
    neutral: ClassVar = {"defer_loading": (False,)}


class Format(Strict):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    # Kept to in either case.
    strict: bool = False

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "Format":
        if (self.schema_ is not None) != (self.type == "json_schema"):
            raise refuse("schema", "goes with 'type': 'json_schema', and with no other")
        return self

    def wanted(self) -> Wanted | None:
        if self.type == "text":
            return None
        return Wanted(of_schema(self.schema_ or ANY_OBJECT), "text.format.schema")


class TextOptions(Strict):
    format: Format = Field(default=Format())
    neutral: ClassVar = {"verbosity": ("medium",)}


class Reasoning(Strict):
    effort: Effort | None = None
    neutral: ClassVar = {"summary": ("auto",), "generate_summary": ("auto",), "context": ("auto",)}


class StreamOptions(Strict):
    neutral: ClassVar = {"include_obfuscation": (False,)}


class InputTokensRequest(Strict):
    model: str = Field(min_length=1, max_length=256, description="one of `/v1/models`; 404 otherwise")
    input: Annotated[
        Many[Annotated[InputItem, AfterValidator(decodable)]],
        Field(min_length=1),
        BeforeValidator(_as_items, json_schema_input_type=str | Many[InputItem]),
    ] = Field(description="a string, or items: messages, reasoning, function calls and outputs; text only")
    instructions: str | None = None
    previous_response_id: str | None = Field(
        None, description="kept in memory by this gateway; 404 when gone"
    )
    tools: Many[FunctionTool] = Field(
        [], description="functions; `strict` keeps their arguments to the schema"
    )
    tool_choice: Any = Field(
        None, description="`none`, `auto`, `required`, a function, or `allowed_tools`; enforced"
    )
    parallel_tool_calls: bool = Field(True, description="`false`: the answer ends with its first call")
    text: TextOptions = Field(TextOptions(), description="`format`: `text`, `json_object`, `json_schema`")
    reasoning: Reasoning = Field(Reasoning(), description="`effort`; there are no summaries")

    neutral: ClassVar = {"conversation": (), "truncation": ("disabled",)}

    @model_validator(mode="after")
    def _tools_agree(self) -> "InputTokensRequest":
        check_names([tool.name for tool in self.tools])
        return self

    def conversation(self, history: Sequence[Any]) -> Conversation:
        """`history`: the items before this request's."""
        system = [Message("system", self.instructions)] if self.instructions else []
        choice = tool_choice(self.tool_choice, [tool.name for tool in self.tools])
        return Conversation(
            messages=(*system, *conversation_messages([*history, *self.input])),
            tools=tuple(
                OfferedTool(tool.name, tool.description, tool.parameters, tool.strict)
                for tool in self.tools
                if choice.offers(tool.name)
            ),
            effort=self.reasoning.effort,
        )

    def translated(self, history: Sequence[Any]) -> GenerationRequest:
        """Raises `ApiError`."""
        return GenerationRequest(
            model=self.model,
            prompt=self.conversation(history),
            tool_choice=tool_choice(self.tool_choice, [tool.name for tool in self.tools]),
            parallel_tool_calls=self.parallel_tool_calls,
            grammar=self.text.format.wanted(),
        )


class ResponsesRequest(InputTokensRequest):
    stream: bool = False
    stream_options: StreamOptions | None = None
    background: bool = Field(False, description="not together with `stream`; poll, or cancel")
    store: bool = Field(True, description="the last ones are kept in memory, by this gateway alone")
    include: Many[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = Field([])
    max_output_tokens: int | None = Field(
        None, ge=1, description="a limit: what does not fit behind the prompt is cut off it"
    )
    temperature: float | None = Field(None, ge=0, le=2, description="as in chat completions")
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int = Field(0, ge=0, le=20, description=f'with `include: ["{LOGPROBS}"]`')

    user: str = Field("", description=LABEL)
    safety_identifier: str = Field("", description=LABEL)
    prompt_cache_key: str = Field("", description=LABEL)
    metadata: Labels = Field({}, description=LABELS)

    neutral: ClassVar = InputTokensRequest.neutral | {
        "access_programs": (),
        "background_options": (),
        "context_management": ([],),
        "image": (),
        "max_tool_calls": (ANYTHING,),  # concerns tools that the server runs, and there are none
        "moderation": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
    }

    @model_validator(mode="after")
    def _agree(self) -> "ResponsesRequest":
        if self.background and self.stream:
            raise refuse("background", "cannot be streamed: poll for it")
        if self.background and not self.store:
            raise refuse("background", "needs 'store': where else should it be found")
        if self.top_logprobs and LOGPROBS not in self.include:
            raise refuse("top_logprobs", f"needs '{LOGPROBS}' in 'include'")
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "'stream_options' is only allowed with 'stream'")
        return self

    def translated(self, history: Sequence[Any]) -> GenerationRequest:
        return replace(
            super().translated(history),
            sampling=SamplingWishes(temperature=self.temperature, top_p=self.top_p),
            max_tokens=self.max_output_tokens,
            logprobs=self.top_logprobs if LOGPROBS in self.include else None,
            stream=self.stream,
        )

    def told(self) -> dict[str, Any]:
        """What a response repeats of its request."""
        return {
            "background": self.background,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key or None,
            "reasoning": {"effort": self.reasoning.effort, "summary": None},
            "safety_identifier": self.safety_identifier or None,
            "service_tier": "default",
            "store": self.store,
            "temperature": self.temperature,
            "text": {"format": self.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": self.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools],
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user or None,
        }
