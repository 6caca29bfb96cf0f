"""The text side of one model, made of its tokenizer's files."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from tokenizers import Tokenizer

from moebius_gateway.text.assembler import AnswerAssembler
from moebius_gateway.text.conversation import Conversation, Tool
from moebius_gateway.text.errors import PromptError, TextError
from moebius_gateway.text.parsing.registry import (
    by_name,
    detect,
    ends_reasoning,
    opens_reasoning,
    spelt_tokens,
    stays_in_reasoning,
)
from moebius_gateway.text.parsing.spec import Channel, ParserSpec
from moebius_gateway.text.parsing.stream import parser_for
from moebius_gateway.text.template import ChatTemplate
from moebius_gateway.text.time_limit import stoppable
from moebius_gateway.text.token_bytes import TokenBytes
from moebius_gateway.types import GenerationError, Reason

# Up to so many characters (a few milliseconds) a request's text is tokenized on the event loop.
INLINE_CHARACTERS = 4096
# Seconds that a chat template, which comes with the checkpoint and may loop for ever, gets.
TEMPLATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's authors recommend (generation_config.json), where a request says nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids, and what reading the answer needs to know.

    `chat`: the answer has a format, and is not just text. `in_reasoning`: the prompt ends inside of
    reasoning. `reasoned`: it ends behind it, and nothing is left but the answer. `continued`: it ends in the
    middle of what is said. `tools`: those that were offered.
    """

    ids: tuple[int, ...]
    chat: bool = False
    in_reasoning: bool = False
    reasoned: bool = False
    continued: bool = False
    tools: tuple[Tool, ...] = ()


class TextModel:
    """Tokenizer, chat template, answer format and sampling defaults of a model.

    `encode_chat` belongs to one event loop; all else can be used from any thread.
    """

    def __init__(self, files: Mapping[str, bytes], family: str | None = None) -> None:
        """`files`: name to content, as a worker serves them. Raises `TextError`, naming the file.

        `family`: how the model writes reasoning and calls, where that cannot be told by its chat template.
        """
        if "tokenizer.json" not in files:
            raise TextError(f"tokenizer.json is missing; there is {sorted(files) or 'nothing'}")
        config = _json_object(files, "tokenizer_config.json")
        try:
            self._tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises nothing narrower
            raise TextError(f"tokenizer.json cannot be loaded: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.token_bytes = TokenBytes(self._tokenizer)
        # Text to id.
        self.special_tokens = self.token_bytes.special()
        source = _template_source(files, config)
        self._template = None if source is None else ChatTemplate(source, _special_tokens(config))
        self._rendering = asyncio.Lock()
        self.spec = by_name(family) if family else detect(source or "", {}, self.special_tokens)
        self._chat_bytes = TokenBytes(self._tokenizer, spelt_tokens(self.spec, self.special_tokens))
        self.defaults = _sampling_defaults(_json_object(files, "generation_config.json"))

    async def encode_chat(self, conversation: Conversation) -> EncodedPrompt:
        """The prompt that asks for the answer. Raises `PromptError`, and `GenerationError` for now."""
        if self._template is None:
            raise PromptError(
                "this model has no chat template: use /v1/completions, or add chat_template.jinja"
            )
        if conversation.tools and not _writes_calls(self.spec):
            raise PromptError("it is not known how this model writes tool calls", "tools")
        text = await self._rendered(self._template, conversation)
        # The template writes all special tokens itself.
        [ids] = await self.encode([text], special=False)
        continued = conversation.continued
        thinks = (
            stays_in_reasoning(self.spec, conversation.messages[-1].content)
            if continued
            else opens_reasoning(self.spec, text)
        )
        return EncodedPrompt(
            ids,
            chat=True,
            in_reasoning=thinks,
            reasoned=not thinks and (continued or ends_reasoning(self.spec, text)),
            continued=continued and not thinks,
            tools=conversation.tools,
        )

    async def _rendered(self, template: ChatTemplate, conversation: Conversation) -> str:
        """One at a time: several threads that compute Python would slow down the event loop."""
        try:
            async with asyncio.timeout(TEMPLATE_SECONDS):
                await self._rendering.acquire()
        except TimeoutError as error:
            message = "the chat templates of other requests take long: try again shortly"
            raise GenerationError(
                Reason.OVERLOADED, message, retryable=True, retry_after=TEMPLATE_SECONDS
            ) from error
        try:
            async with asyncio.timeout(TEMPLATE_SECONDS):
                return await stoppable(template.render, conversation)
        except TimeoutError as error:
            message = f"the chat template took longer than {TEMPLATE_SECONDS:g} seconds for these messages"
            raise PromptError(message, "messages") from error
        finally:
            self._rendering.release()

    async def encode(self, texts: Sequence[str], *, special: bool = True) -> list[tuple[int, ...]]:
        """Token ids of plain prompts. `special`: with what the tokenizer puts at the beginning of a text."""
        if sum(map(len, texts)) > INLINE_CHARACTERS:
            return await asyncio.to_thread(self._encode, texts, special)
        return self._encode(texts, special)

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is spelt `text`; None if there is none."""
        token_id = self._tokenizer.token_to_id(text)
        return token_id if token_id is not None and self.token_bytes.is_special(token_id) else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones spelt out."""
        return b"".join(map(self.token_bytes.spelling, ids)).decode("utf-8", "replace")

    def assembler(
        self,
        prompt: EncodedPrompt,
        stops: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        *,
        one_call: bool = False,
    ) -> AnswerAssembler:
        """What makes the answer to `prompt` of its tokens."""
        if not prompt.chat:
            return AnswerAssembler(self.token_bytes, stops, stop_token_ids, min_tokens)
        tools = {tool.name: tool.parameters for tool in prompt.tools}
        parser = parser_for(
            self.spec, tools, started_in_reasoning=prompt.in_reasoning, continued=prompt.continued
        )
        return AnswerAssembler(self._chat_bytes, stops, stop_token_ids, min_tokens, parser, one_call=one_call)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[tuple[int, ...]]:
        # Unlike the call for one text, this one lets other threads run, and computes no offsets.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [tuple(encoding.ids) for encoding in encodings]


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = orjson.loads(files.get(name, b"{}"))
    except orjson.JSONDecodeError as error:
        raise TextError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TextError(f"{name} is not a JSON object")
    return value


def _template_source(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", "replace")
    template = config.get("chat_template")
    if isinstance(template, list):  # named ones, of which "default" is for plain chat
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like; each is a string or an object with the string as its content."""
    tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _sampling_defaults(config: Mapping[str, Any]) -> SamplingDefaults:
    given = {name: config[name] for name in SamplingDefaults.__slots__ if config.get(name) is not None}
    for name, value in given.items():
        if type(value) is not int and (type(value) is not float or name == "top_k"):
            raise TextError(f"generation_config.json: {name} is {value!r}")
    return SamplingDefaults(**given)


def _writes_calls(spec: ParserSpec) -> bool:
    forms = [*spec.start, *(form for rule in spec.rules for form in rule.forms)]
    return any(not isinstance(form, Channel) for form in forms)
