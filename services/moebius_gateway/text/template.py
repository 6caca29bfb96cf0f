"""Chat templates: from messages to the text that the model was trained to continue.

Templates come with checkpoints, are written for the environment that `transformers` gives them, and are not
trusted: they run in Jinja's sandbox, which lets them change nothing and call nothing but what is given here.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moebius_gateway.text.errors import PromptError, TextError


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
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template cannot be compiled: {error}") from error
        self._special_tokens = dict(special_tokens)
        # Most templates know only the older name of the role.
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the assistant's answer begins. Raises `PromptError`."""
        if not self._knows_developer:
            messages = [
                m | {"role": "system"} if m["role"] == "developer" else m for m in map(dict, messages)
            ]
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise PromptError(error.message or "the chat template refuses these messages") from error
        except Exception as error:  # foreign code: whatever it raises, these messages made it do so
            raise PromptError(f"the chat template cannot render these messages: {error}") from error


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
