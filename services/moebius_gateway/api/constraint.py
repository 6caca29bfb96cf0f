"""From what a request demands of its answers to one grammar that the worker enforces."""

import asyncio
from collections.abc import Sequence

from moebius_gateway.api.errors import invalid
from moebius_gateway.api.request import GenerationRequest, ToolMode
from moebius_gateway.text.answer_grammar import Demands, answer_grammar
from moebius_gateway.text.conversation import Conversation, Tool
from moebius_gateway.text.errors import UnsupportedError
from moebius_gateway.text.grammar import GrammarError, Part, check, fault, of_schema
from moebius_gateway.text.model import EncodedPrompt, TextModel
from moebius_gateway.text.parsing.families.generic import PLAIN


async def constraint(
    request: GenerationRequest, prompts: Sequence[EncodedPrompt], text: TextModel
) -> str | None:
    """The grammar, or None if the model may say anything. Raises `ApiError`, which says what is to blame."""
    if not _constrained(request):
        return None
    if prompts[0].continued and _demanding(request):
        raise invalid("the answer is begun already: it can be kept to no format, budget or call", "messages")
    # A large schema takes as long as a few tokens.
    return await asyncio.to_thread(_constraint, request, prompts[0], text)


def _constrained(request: GenerationRequest) -> bool:
    return _demanding(request) or (
        request.tool_choice.mode is ToolMode.AUTO and any(tool.strict for tool in _tools(request))
    )


def _demanding(request: GenerationRequest) -> bool:
    """Whether the answer as a whole is held to something."""
    return (
        request.grammar is not None
        or request.reasoning_budget is not None
        or request.tool_choice.mode is ToolMode.REQUIRED
    )


def _constraint(request: GenerationRequest, prompt: EncodedPrompt, text: TextModel) -> str:
    if request.grammar is not None:
        _check(request.grammar.part, request.grammar.param)
    required = request.tool_choice.mode is ToolMode.REQUIRED
    tools = _tools(request)
    names = request.tool_choice.names
    # Once an answer is held to a grammar, that has all tools that may be called.
    held = required or request.grammar is not None or any(tool.strict for tool in tools)
    tools = tuple(tool for tool in tools if held and (not names or tool.name in names))
    for tool in tools:
        if tool.strict:
            _check(of_schema(tool.parameters), f"tools ('{tool.name}')")
    demands = Demands(
        answer=None if request.grammar is None else request.grammar.part,
        tools=tools,
        must_call=required,
        one_call=request.one_call,
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
