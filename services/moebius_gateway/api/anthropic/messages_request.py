"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from moebius_gateway.api.anthropic.blocks import BlockMessage, TextBlocks, ToolUseBlock, joined
from moebius_gateway.api.openai.messages import check_names
from moebius_gateway.api.request import GenerationRequest, SamplingWishes, ToolChoice, ToolMode
from moebius_gateway.api.strict import ANYTHING, Checked, Many, Strict, refuse
from moebius_gateway.text.conversation import Conversation, Message
from moebius_gateway.text.conversation import Tool as OfferedTool
from moebius_gateway.text.grammar import Wanted, of_schema

# Claude Code begins the system prompt with a block for Anthropic's accounting. It instructs nobody, and has a
# digest that changes with every request: in the prompt it would make every prefix cache useless.
ATTRIBUTION = "x-anthropic-billing-header:"
# The least that Anthropic's own API takes.
LEAST_BUDGET = 1024


class Tool(Strict):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    neutral: ClassVar = {
        "cache_control": (ANYTHING,),
        "eager_input_streaming": (True, False),
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "input_examples": ([],),
    }


class Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _name_of_a_tool(self) -> "Choice":
        if (self.name is not None) != (self.type == "tool"):
            raise refuse("name", "goes with 'type': 'tool', and with no other")
        return self


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=LEAST_BUDGET)
    neutral: ClassVar = {"display": ("summarized",)}

    @model_validator(mode="after")
    def _budget(self) -> "Thinking":
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            raise refuse("budget_tokens", "goes with 'type': 'enabled', and with no other")
        return self


class Format(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class Metadata(Strict):
    user_id: str | None = None


class CountRequest(Strict):
    model: str = Field(min_length=1, max_length=256, description="one of `/v1/models`; 404 otherwise")
    messages: Annotated[Many[BlockMessage], Field(min_length=1)] = Field(
        description="blocks `text`, `thinking`, `tool_use`, `tool_result`; images and documents: 400. An "
        "assistant's at the end is begun, and the answer goes on with it"
    )
    system: TextBlocks = Field(
        [], description=f"a string or text blocks; such as begin with `{ATTRIBUTION}` are left out"
    )
    tools: Many[Tool] = Field([], description="`strict` keeps the input to the schema")
    tool_choice: Choice = Field(Choice(type="auto"), description="`auto`, `any`, `tool`, `none`; enforced")
    thinking: Thinking | None = Field(None, description="left out: as the model does by itself")
    output_config: OutputConfig | None = Field(None, description="`effort`, `format` (`json_schema`)")

    neutral: ClassVar = {
        "cache_control": (ANYTHING,),
        "speed": ("standard",),
        # Thinking is kept as it is sent.
        "context_management": (
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "mcp_servers": ([],),
    }

    @field_validator("messages")
    @classmethod
    def _calls_are_answered(cls, messages: list[BlockMessage]) -> list[BlockMessage]:
        if any(isinstance(block, ToolUseBlock) for block in messages[-1].content):
            raise refuse("", "the last message calls tools: their results are missing")
        return messages

    @model_validator(mode="after")
    def _tools_agree(self) -> "CountRequest":
        names = [tool.name for tool in self.tools]
        check_names(names)
        if self.tool_choice.type in ("any", "tool") and not names:
            raise refuse("tool_choice", "needs 'tools' to choose from")
        if self.tool_choice.name is not None and self.tool_choice.name not in names:
            raise refuse("tool_choice", f"names '{self.tool_choice.name}', which is none of 'tools'")
        return self

    def translated(self) -> GenerationRequest:
        config = self.output_config or OutputConfig()
        choice = self.tool_choice
        told = [block for block in self.system if not block.text.startswith(ATTRIBUTION)]
        system = [Message("system", joined(told))] if told else []
        modes = {"auto": ToolMode.AUTO, "none": ToolMode.NONE}
        return GenerationRequest(
            model=self.model,
            prompt=Conversation(
                messages=(*system, *(m for message in self.messages for m in message.translated())),
                tools=tuple(
                    OfferedTool(tool.name, tool.description, tool.input_schema, tool.strict)
                    for tool in self.tools
                ),
                effort=config.effort,
                thinking=None if self.thinking is None else self.thinking.type != "disabled",
                continued=self.messages[-1].role == "assistant",
            ),
            tool_choice=ToolChoice(
                modes.get(choice.type, ToolMode.REQUIRED),
                frozenset() if choice.name is None else frozenset({choice.name}),
            ),
            parallel_tool_calls=not choice.disable_parallel_tool_use,
            reasoning_budget=None if self.thinking is None else self.thinking.budget_tokens,
            grammar=None
            if config.format is None
            else Wanted(of_schema(config.format.schema_), "output_config.format.schema"),
        )


class MessagesRequest(CountRequest):
    max_tokens: int = Field(ge=1, description="a limit: what does not fit behind the prompt is cut off it")
    stop_sequences: Checked[Annotated[str, Field(min_length=1, max_length=1024)]] = Field([], max_length=16)
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: Metadata | None = Field(None, description="a label; nothing depends on it")

    neutral: ClassVar = CountRequest.neutral | {
        "service_tier": ("auto", "standard_only"),
        "container": (),
        "inference_geo": (),
    }

    @model_validator(mode="after")
    def _budget_leaves_an_answer(self) -> "MessagesRequest":
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise refuse("thinking.budget_tokens", "must be below 'max_tokens'")
        return self

    def translated(self) -> GenerationRequest:
        return replace(
            super().translated(),
            sampling=SamplingWishes(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p),
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences),
            stream=self.stream,
        )
