"""Which parameters of each dialect are honoured and which refused, as tables of docs/api.md.

    python -m moebius_gateway.api.parameter_table docs/api.md

writes them between the file's `<!-- parameters -->` marks; a test holds the file to it.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moebius_gateway.api.anthropic.messages_request import CountRequest, MessagesRequest
from moebius_gateway.api.openai.chat_request import ChatRequest
from moebius_gateway.api.openai.completion_request import CompletionRequest
from moebius_gateway.api.responses.request import InputTokensRequest, ResponsesRequest
from moebius_gateway.api.strict import ANYTHING, Strict
from moebius_gateway.api.tokenization import DetokenizeRequest, TokenizeRequest

BODIES: Mapping[str, type[Strict]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponsesRequest,
    "POST /v1/responses/input_tokens": InputTokensRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
}
BEGIN, END = "<!-- parameters -->", "<!-- /parameters -->"
# Limits beyond are those of integers of 32 or 64 bits.
TOO_LARGE = 10**6
LIMITS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "maxItems": "at most {}"}


def tables() -> str:
    """All of them, as Markdown."""
    return "\n\n".join(f"### `{name}`\n\n{table(body)}" for name, body in BODIES.items())


def table(body: type[Strict]) -> str:
    """The parameters that are honoured, then those that are not."""
    lines = ["| parameter | | |", "|---|---|---|", *_honoured(body), *_refused(body)]
    return "\n".join(lines)


def rewritten(document: str) -> str:
    """The document with the tables of now."""
    pattern = re.compile(f"{BEGIN}.*{END}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{tables()}\n{END}", document)


def _honoured(body: type[Strict]) -> Iterator[str]:
    schema = body.model_json_schema()
    for name, about in schema["properties"].items():
        notes = [_range(about), about.get("description", "")]
        required = " (required)" if name in schema.get("required", ()) else ""
        yield f"| `{name}` | honoured{required} | {_cell('; '.join(filter(None, notes)))} |"


def _refused(body: type[Strict]) -> Iterator[str]:
    for name, values in sorted(body.neutral.items()):
        if ANYTHING in values:
            yield f"| `{name}` | accepted | changes nothing here |"
        else:
            same = " and ".join(f"`{json.dumps(value)}`" for value in values)
            yield f"| `{name}` | refused | {f'but for {_cell(same)}' if same else ''} |"


def _range(about: Mapping[str, Any]) -> str:
    """The limits of a number, or the words of an enumeration."""
    options = [about, *(option for option in about.get("anyOf", ()) if option.get("type") != "null")]
    for option in options:
        if "enum" in option:
            return ", ".join(f"`{word}`" for word in option["enum"])
        limits = [
            text.format(f"{option[key]:g}")
            for key, text in LIMITS.items()
            if abs(option.get(key, TOO_LARGE)) < TOO_LARGE
        ]
        if limits:
            return ", ".join(limits)
    return ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
