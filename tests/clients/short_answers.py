"""A hook of schemathesis: answers are short and few, whatever is asked for.

Only what is valid is changed, and into what is valid: what has to be refused stays so.
"""

from typing import Any

import schemathesis

TOKENS, CHOICES = 8, 4
MAX_CHOICES = 128
# The parameter that limits an answer, and whether it may be left out.
LIMITS = {
    "/v1/completions": ("max_tokens", True),
    "/v1/chat/completions": ("max_tokens", True),
    "/v1/messages": ("max_tokens", False),
    "/v1/responses": ("max_output_tokens", True),
}


def shortened(path: str, body: dict[str, Any]) -> dict[str, Any]:
    name, optional = LIMITS[path]
    short = {
        limit: TOKENS
        for limit in (name, "max_completion_tokens")
        if type(body.get(limit)) is int and body[limit] > TOKENS
    }
    if optional and body.get(name) is None and body.get("max_completion_tokens") is None:
        short[name] = TOKENS
    if type(body.get("n")) is int and CHOICES < body["n"] <= MAX_CHOICES:
        short["n"] = CHOICES
    return body | short


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    if case.path in LIMITS and isinstance(case.body, dict):
        case.body = shortened(case.path, case.body)
