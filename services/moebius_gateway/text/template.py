"""Chat templates: from a conversation to the text that the model was trained to continue.

Templates come with checkpoints, are written for the environment that `transformers` gives them, and are not
trusted: they run in Jinja's sandbox, which lets them change nothing and call nothing but what is given here.
"""

import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moebius_gateway.text.conversation import Conversation, Message
from moebius_gateway.text.errors import PromptError, TextError
from moebius_gateway.text.messages import MessageWriter

# What the gateway itself gives to templates.
OWN_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
EFFORT = "reasoning_effort"
# The efforts that models which know any were trained on; others are in a template's text if it knows them.
USUAL_EFFORTS = frozenset({"low", "medium", "high"})
# Variables that turn reasoning on and off.
SWITCHES = ("enable_thinking", "thinking")
# Without one of these in its template a model was not trained to reason.
SIGNS_OF_REASONING = ("<think>", "[THINK]", "<|channel|>", "<|channel>", "reasoning", EFFORT)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: name to text, as templates use them ("bos_token"). Raises `TextError`."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template cannot be compiled: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._takes_tools = "tools" in variables
        self._settable = variables - OWN_VARIABLES - environment.globals.keys() - special_tokens.keys()
        self._switch = next((name for name in SWITCHES if name in self._settable), None)
        self._reasons = any(sign in source for sign in SIGNS_OF_REASONING)
        self._writer = MessageWriter(source)
        # Stands where an answer that is begun goes on. Letters and digits, which no template changes.
        self._mark = f"moebius{secrets.token_hex(8)}"

    def render(self, conversation: Conversation) -> str:
        """The prompt, up to where the assistant's answer begins, or goes on. Raises `PromptError`."""
        if conversation.tools and not self._takes_tools:
            raise PromptError("this model's chat template has no place for tools", "tools")
        variables = (
            self._special_tokens | self._reasoning(conversation) | self._client_variables(conversation)
        )
        messages = self._marked(conversation.messages) if conversation.continued else conversation.messages
        first: PromptError | None = None
        for spelling in self._writer.spellings(messages):
            try:
                text = self._render(spelling, conversation, variables)
                return self._begun(text) if conversation.continued else text
            except PromptError as error:
                first = first or error
        assert first is not None
        raise first

    def _marked(self, messages: Sequence[Message]) -> list[Message]:
        *before, last = messages
        return [*before, replace(last, content=last.content + self._mark)]

    def _begun(self, text: str) -> str:
        """Up to the mark: what the template writes behind a message is not said yet."""
        prompt, mark, _ = text.rpartition(self._mark)
        if not mark:
            message = "this model's chat template has no place for an answer that is begun"
            raise PromptError(message, "messages")
        return prompt

    def _render(
        self, messages: list[dict[str, Any]], conversation: Conversation, variables: Mapping[str, Any]
    ) -> str:
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": dict(tool.parameters),
                },
            }
            for tool in conversation.tools
        ]
        try:
            return self._template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=not conversation.continued,
                **variables,
            )
        except jinja2.TemplateError as error:
            raise PromptError(
                error.message or "the chat template refuses these messages", "messages"
            ) from error
        except Exception as error:  # foreign code: whatever it raises, these messages made it do so
            message = f"the chat template cannot render these messages: {error}"
            raise PromptError(message, "messages") from error

    def _client_variables(self, conversation: Conversation) -> dict[str, Any]:
        given = dict(conversation.template_variables)
        for name in given.keys() - self._settable:
            known = ", ".join(sorted(self._settable)) or "none"
            raise PromptError(
                f"this model's chat template has no variable '{name}'; it has: {known}",
                f"chat_template_kwargs.{name}",
            )
        return given

    def _reasoning(self, conversation: Conversation) -> dict[str, Any]:
        """The variables that ask for the wanted amount of reasoning. What cannot be asked for is refused."""
        effort, thinking = conversation.effort, conversation.thinking
        variables: dict[str, Any] = {}
        if effort is not None and EFFORT in self._settable and self._trained_on(effort):
            variables[EFFORT] = effort
        elif effort == "none":
            thinking = False
        elif effort is not None and self._switch is not None:
            thinking = True
        elif effort is not None:
            known = "; it has low, medium and high" if EFFORT in self._settable else ""
            raise PromptError(f"this model has no reasoning effort '{effort}'{known}", EFFORT)
        if thinking is None:
            return variables
        if self._switch is not None:
            return variables | {self._switch: thinking}
        if thinking is self._reasons:
            return variables  # as it does by itself
        if EFFORT in self._settable and self._trained_on("none"):
            return variables | {EFFORT: "none"}
        message = "this model does not reason" if thinking else "this model's reasoning cannot be turned off"
        raise PromptError(message, EFFORT if effort else "thinking")

    def _trained_on(self, effort: str) -> bool:
        return effort in USUAL_EFFORTS or f"'{effort}'" in self.source or f'"{effort}"' in self.source


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the assistant's words for training; ignored."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
