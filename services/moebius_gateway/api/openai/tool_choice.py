"""`tool_choice` as OpenAI's two APIs spell it."""

from collections.abc import Collection
from typing import Any

from moebius_gateway.api.errors import invalid
from moebius_gateway.api.request import ToolChoice, ToolMode

PARAM = "tool_choice"


def tool_choice(given: Any, names: Collection[str]) -> ToolChoice:
    """`names`: those of the request's tools. Raises `ApiError`.

    Chat completions wrap what concerns a function in an object of that name, responses do not.
    """
    match given:
        case None | "auto":
            choice = ToolChoice()
        case "none":
            choice = ToolChoice(ToolMode.NONE)
        case "required":
            choice = ToolChoice(ToolMode.REQUIRED)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}, **rest} if (
            not rest
        ):
            choice = _allowed(mode, tools)
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools), **rest} if not rest:
            choice = _allowed(mode, tools)
        case _:
            choice = ToolChoice(ToolMode.REQUIRED, frozenset({_name(given)}))
    if choice.mode is ToolMode.REQUIRED and not names:
        raise invalid("'tool_choice' needs 'tools' to choose from", PARAM)
    for name in choice.names - set(names):
        raise invalid(f"'tool_choice' names '{name}', which is none of 'tools'", PARAM)
    return choice


def _allowed(mode: Any, tools: list[Any]) -> ToolChoice:
    if mode not in ("auto", "required") or not tools:
        raise invalid("allowed_tools has a mode, 'auto' or 'required', and one or more tools", PARAM)
    return ToolChoice(ToolMode(mode), frozenset(map(_name, tools)))


def _name(given: Any) -> str:
    match given:
        case {"type": "function", "function": {"name": str(name)}, **rest} if not rest:
            return name
        case {"type": "function", "name": str(name), **rest} if not rest:
            return name
    raise invalid(
        "'tool_choice' is 'none', 'auto', 'required', a function of 'tools', or allowed_tools", PARAM
    )
