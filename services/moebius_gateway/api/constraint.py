"""From what a request demands of its answers to one grammar that the worker enforces."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moebius_gateway.api.errors import invalid
from moebius_gateway.api.request import GenerationRequest, ToolMode
from moebius_gateway.text.answer_grammar import Demands, answer_grammar
from moebius_gateway.text.call_grammar import UnsupportedError
from moebius_gateway.text.conversation import Conversation, Tool
from moebius_gateway.text.grammar import GrammarError, Part, check, fault, of_schema
from moebius_gateway.text.model import EncodedPrompt, TextModel
from moebius_gateway.text.parsing.families.generic import PLAIN


async def constraint(
    request: GenerationRequest, prompts: Sequence[EncodedPrompt], text: TextModel
) -> str | None:
    """The grammar, or None if the model may say anything. Raises `ApiError`, which says what is to blame."""
    if not _constrained(request):
        return None
    # A large schema takes as long as a few tokens.
    return await asyncio.to_thread(_constraint, request, prompts[0], text)


def _constrained(request: GenerationRequest) -> bool:
    return (
        request.grammar is not None
        or request.reasoning_budget is not None
        or request.tool_choice.mode is ToolMode.REQUIRED
        or (request.tool_choice.mode is ToolMode.AUTO and any(tool.strict for tool in _tools(request)))
    )


def _constraint(request: GenerationRequest, prompt: EncodedPrompt, text: TextModel) -> str:
    if request.grammar is not None:
        _check(request.grammar.part, request.grammar.param)
    required = request.tool_choice.mode is ToolMode.REQUIRED
    tools = _tools(request)
    names = request.tool_choice.names
    # Once an answer is held to a grammar, that has all tools that may be called.
    held = required or request.grammar is not None or any(tool.strict for tool in tools)
    tools = tuple(_enforceable(tool) for tool in tools if held and (not names or tool.name in names))
    demands = Demands(
        answer=None if request.grammar is None else request.grammar.part,
        tools=tools,
        must_call=required,
        one_call=not request.parallel_tool_calls,
        reasoning_budget=request.reasoning_budget,
    )
    try:
        written = answer_grammar(
            text.spec if prompt.chat else PLAIN,
            text.special_tokens,
            demands,
            in_reasoning=prompt.in_reasoning,
            reasoned=prompt.reasoned,
        )
    except UnsupportedError as error:
        raise invalid(str(error), error.param) from error
    if (message := fault(written)) is not None:
        raise invalid(f"the answer's grammar cannot be enforced: {message}")
    return written


def _tools(request: GenerationRequest) -> tuple[Tool, ...]:
    return request.offered().tools if isinstance(request.prompt, Conversation) else ()


def _check(part: Part, param: str) -> None:
    try:
        check(part)
    except GrammarError as error:
        where = param + error.where
        raise invalid(f"'{where}' cannot be enforced: {error}", where, "unsupported_schema") from error


def _enforceable(tool: Tool) -> Tool:
    """A strict tool as it is, or else `ApiError`; of another, as much as can be enforced."""
    if tool.strict:
        _check(of_schema(tool.parameters), f"tools ('{tool.name}')")
    if tool.strict or _can_be_enforced(tool.parameters):
        return tool
    definitions = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    properties = {
        key: schema if _can_be_enforced({**definitions, **_object(schema)}) else {}
        for key, schema in _object(tool.parameters.get("properties")).items()
    }
    loose = {"type": "object", "properties": properties, "required": tool.parameters.get("required", [])}
    for parameters in ({**loose, **definitions}, loose):
        if _can_be_enforced(parameters):
            return replace(tool, parameters=parameters)
    return replace(tool, parameters={"type": "object"})


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _can_be_enforced(schema: Mapping[str, Any]) -> bool:
    try:
        check(of_schema(schema))
    except GrammarError:
        return False
    return True
