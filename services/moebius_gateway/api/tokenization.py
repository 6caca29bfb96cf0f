"""POST /tokenize and /detokenize, as other serving engines have them."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from moebius_gateway.api.body import parse
from moebius_gateway.api.choices import check_ids
from moebius_gateway.api.model_routes import known_model
from moebius_gateway.api.openai.messages import Message, Tool, check_continued
from moebius_gateway.api.prepare import encoded
from moebius_gateway.api.request import GenerationRequest
from moebius_gateway.api.services import Services
from moebius_gateway.api.size import check_size
from moebius_gateway.api.strict import Checked, Many, Strict, refuse
from moebius_gateway.text.conversation import Conversation
from moebius_gateway.text.model import TextModel

MAX_DETOKENIZED = 1 << 20


class TokenizeRequest(Strict):
    model: str = Field(min_length=1, max_length=256, description="one of `/v1/models`; 404 otherwise")
    prompt: str | None = Field(None, description="a text, or else `messages`")
    add_special_tokens: bool | None = Field(
        None, description="with `prompt`: what the tokenizer puts at a text's beginning; by default `true`"
    )
    messages: Annotated[Many[Message], Field(min_length=1)] | None = Field(
        None, description="as in chat completions"
    )
    tools: Many[Tool] = Field([], description="as in chat completions")
    chat_template_kwargs: dict[str, Any] = Field({}, description="as in chat completions")
    continue_final_message: bool = Field(False, description="as in chat completions")
    add_generation_prompt: bool | None = Field(None, description="as in chat completions")
    return_token_strs: bool = Field(False, description="adds `token_strs`")
    neutral: ClassVar = {"chat_template": ()}

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "there must be either 'prompt' or 'messages'")
        if self.messages is not None and self.add_special_tokens:
            raise refuse("add_special_tokens", "the chat template writes them itself")
        check_continued(self.messages or [], self.continue_final_message, self.add_generation_prompt)
        return self

    def prompted(self) -> GenerationRequest:
        """The request that would have this prompt."""
        if self.messages is None:
            return GenerationRequest(self.model, (self.prompt or "",))
        conversation = Conversation(
            messages=tuple(message.translated() for message in self.messages),
            tools=tuple(tool.function.translated() for tool in self.tools),
            template_variables=self.chat_template_kwargs,
            continued=self.continue_final_message,
        )
        return GenerationRequest(self.model, conversation)


class DetokenizeRequest(Strict):
    model: str = Field(min_length=1, max_length=256, description="one of `/v1/models`; 404 otherwise")
    tokens: Checked[int] = Field(max_length=MAX_DETOKENIZED, description="token ids")


def _spelt(text: TextModel, ids: Sequence[int]) -> list[str]:
    return [text.decode([token_id]) for token_id in ids]


async def tokenize(services: Services, http: Request) -> Response:
    body = await parse(http, TokenizeRequest)
    model = known_model(services.backend, body.model)
    text = await services.texts.get(model)
    request = body.prompted()
    check_size(request, services.settings)
    [prompt] = await encoded(request, model, text, special=body.add_special_tokens is not False)
    answer: dict[str, Any] = {
        "count": len(prompt.ids),
        "max_model_len": model.max_model_len,
        "tokens": prompt.ids,
        "token_strs": await asyncio.to_thread(_spelt, text, prompt.ids) if body.return_token_strs else None,
    }
    return Response(orjson.dumps(answer), media_type="application/json")


async def detokenize(services: Services, http: Request) -> Response:
    body = await parse(http, DetokenizeRequest)
    model = known_model(services.backend, body.model)
    check_ids(body.tokens, model, "tokens")
    text = await services.texts.get(model)
    said = await asyncio.to_thread(text.decode, body.tokens)
    return Response(orjson.dumps({"prompt": said}), media_type="application/json")
