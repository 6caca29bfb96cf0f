"""The grammar of tool calls in a family's format, so that a model can be held to calling, and to a schema."""

from collections.abc import Sequence
from typing import Any

from moebius_gateway.text.argument_grammar import ArgumentWriter
from moebius_gateway.text.argument_notations import NestedWriter, QuotedWriter, TaggedWriter
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.errors import UnsupportedError
from moebius_gateway.text.grammar import ANY_TEXT, of_schema
from moebius_gateway.text.lark import LarkWriter
from moebius_gateway.text.parsing.spec import (
    Channel,
    Form,
    JsonArguments,
    JsonCall,
    NamedCall,
    NestedArguments,
    ParserSpec,
    QuotedArguments,
    Rule,
)
from moebius_gateway.text.tool_schema import loosened, rebased


def calls(writer: LarkWriter, spec: ParserSpec, tools: Sequence[Tool], *, one: bool) -> str:
    """Nothing but calls, at least one (`one`: and no more). Raises `UnsupportedError`."""
    rule, form = _form(spec, bare=True)
    return writer.rule("calls", _block(writer, rule, form, tools, one=one, opened=False))


def text_with_calls(writer: LarkWriter, spec: ParserSpec, tools: Sequence[Tool], *, one: bool) -> str:
    """Any text, in which calls keep to their tools' parameters. Raises `UnsupportedError`."""
    rule, form = _form(spec, bare=False)
    assert rule is not None
    block = writer.rule("block", _block(writer, rule, form, tools, one=one, opened=True))
    before = writer.up_to("before_call", rule.open)
    return f"({before} {writer.gap} {block}){'?' if one else '*'} {writer.rule('rest', ANY_TEXT)}"


def _form(spec: ParserSpec, *, bare: bool) -> tuple[Rule | None, Form]:
    """The family's usual form of calls. Without `bare`, one that a marker announces."""
    if bare:
        for form in spec.start:
            if isinstance(form, JsonCall):
                return None, form
    for rule in spec.rules:
        for form in rule.forms:
            if isinstance(form, NamedCall) or (isinstance(form, JsonCall) and not (spec.start and not bare)):
                return rule, form
    raise UnsupportedError(
        f"calls in this model's format ('{spec.name}') cannot be enforced: use 'auto', and no strict tools",
        "tool_choice" if bare else "tools",
    )


def _block(
    writer: LarkWriter, rule: Rule | None, form: Form, tools: Sequence[Tool], *, one: bool, opened: bool
) -> str:
    call = writer.rule("call", " | ".join(_call(writer, form, tool, i) for i, tool in enumerate(tools)))
    if rule is None:
        return call
    inner = call if one or not rule.several else f"{call} ({writer.gap} {call})*"
    close = f"({writer.gap} {writer.literal(rule.close[0])})?" if rule.close else ""
    rest = f"{writer.gap} {inner} {close}"
    block = rest if opened else f"{writer.gap} {writer.literal(rule.open)} {rest}"
    again = f"({writer.gap} {writer.literal(rule.open)} {rest})*"
    return block if one or rule.several else f"{block} {again}"


def _call(writer: LarkWriter, form: Form, tool: Tool, number: int) -> str:
    assert not isinstance(form, Channel)
    if isinstance(form, JsonCall):
        # A form without a marker is Llama's, which says "parameters".
        key = "parameters" if form.bare else "arguments"
        arguments = rebased(_parameters(tool), f"#/properties/{key}")
        schema = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: arguments},
            "required": ["name", key],
            "additionalProperties": False,
        }
        return writer.part(f"call_{number}", of_schema(schema))
    head = writer.template(form.heads[0], name=tool.name)
    ends = " | ".join(map(writer.literal, form.ends))
    behind = f"({writer.gap} ({ends}))*" if ends else ""
    return f"{head} {writer.gap} {_arguments(writer, form, tool, number)} {behind}"


def _arguments(writer: LarkWriter, call: NamedCall, tool: Tool, number: int) -> str:
    form = call.arguments
    if isinstance(form, JsonArguments):
        return writer.part(f"arguments_{number}", of_schema(_parameters(tool)))
    notation: ArgumentWriter
    if isinstance(form, QuotedArguments):
        notation = QuotedWriter(writer, tool, number, form)
    elif isinstance(form, NestedArguments):
        notation = NestedWriter(writer, tool, number, form)
    else:
        notation = TaggedWriter(writer, tool, number, form)
    return notation.arguments()


def _parameters(tool: Tool) -> dict[str, Any]:
    """For JSON."""
    return {"type": "object", **tool.parameters} if tool.strict else loosened(tool.parameters)
