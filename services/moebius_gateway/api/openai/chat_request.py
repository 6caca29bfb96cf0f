"""The body of POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from moebius_gateway.api.openai.messages import Message, Tool, check_continued, check_names
from moebius_gateway.api.openai.parameters import GenerationParameters
from moebius_gateway.api.openai.structured import ResponseFormat, the_one
from moebius_gateway.api.openai.tool_choice import tool_choice
from moebius_gateway.api.request import GenerationRequest
from moebius_gateway.api.strict import Many, refuse
from moebius_gateway.text.conversation import Conversation

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationParameters):
    messages: Annotated[Many[Message], Field(min_length=1)] = Field(
        description="roles `system`, `developer`, `user`, `assistant` (with `tool_calls` and "
        "`reasoning_content`), `tool`; content a string or text parts. Images and audio: 400"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="the newer name of `max_tokens`")
    logprobs: bool = Field(
        False, description="after penalties and bias, before a grammar's mask, temperature and truncation"
    )
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: Many[Tool] = Field([], description="functions; `strict` keeps their arguments to the schema")
    tool_choice: Any = Field(
        None, description="`none`, `auto`, `required`, a function, or `allowed_tools`; enforced"
    )
    parallel_tool_calls: bool = Field(True, description="`false`: the answer ends with its first call")
    response_format: ResponseFormat | None = Field(
        None, description="`text`, `json_object`, `json_schema`; enforced, strict or not"
    )
    reasoning_effort: Effort | None = Field(
        None, description="as the chat template can say it; on or off where that is all it knows"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="variables that the model's chat template knows; others: 400"
    )
    continue_final_message: bool = Field(
        False, description="the last message is the assistant's, and the answer goes on with it"
    )
    add_generation_prompt: bool | None = Field(
        None, description="`false` goes with `continue_final_message`, and with nothing else"
    )

    neutral: ClassVar = GenerationParameters.neutral | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "add_special_tokens": (False,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "include_reasoning": (True,),
    }

    @model_validator(mode="after")
    def _agree(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise refuse("top_logprobs", "needs 'logprobs': true")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise refuse("max_tokens", "differs from 'max_completion_tokens', of which it is the older name")
        check_names([tool.function.name for tool in self.tools])
        check_continued(self.messages, self.continue_final_message, self.add_generation_prompt)
        return self

    def translated(self) -> GenerationRequest:
        """Raises `ApiError`."""
        choice = tool_choice(self.tool_choice, [tool.function.name for tool in self.tools])
        formats = self.response_format.wanted("response_format") if self.response_format is not None else []
        return GenerationRequest(
            model=self.model,
            prompt=Conversation(
                messages=tuple(message.translated() for message in self.messages),
                tools=tuple(
                    tool.function.translated() for tool in self.tools if choice.offers(tool.function.name)
                ),
                effort=self.reasoning_effort,
                template_variables=self.chat_template_kwargs,
                continued=self.continue_final_message,
            ),
            sampling=self.sampling(),
            n=self.n,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            grammar=the_one(formats + self.guided()),
            logprobs=self.top_logprobs if self.logprobs else None,
            stream=self.stream,
        )
