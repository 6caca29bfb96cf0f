"""The grammar of tool calls in a family's format, so that a model can be held to calling, and to a schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.grammar import ANY_TEXT, of_schema
from moebius_gateway.text.lark import LarkWriter
from moebius_gateway.text.parsing.schema import argument_types
from moebius_gateway.text.parsing.spec import (
    Channel,
    Form,
    JsonArguments,
    JsonCall,
    NamedCall,
    ParserSpec,
    Rule,
    TaggedArguments,
)

# What a schema may say of a string that is written between tags, beyond its type.
REMARKS = frozenset({"type", "title", "description", "default", "examples", "deprecated"})


class UnsupportedError(Exception):
    """It cannot be enforced in this family's format. `param` is what asks for it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


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
            if isinstance(form, JsonCall) and spec.start and not bare:
                break
            if isinstance(form, JsonCall) or (
                isinstance(form, NamedCall) and isinstance(form.arguments, JsonArguments | TaggedArguments)
            ):
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
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: _object(tool.parameters)},
            "required": ["name", key],
            "additionalProperties": False,
        }
        return writer.part(f"call_{number}", of_schema(schema | _definitions(tool.parameters)))
    if isinstance(form.arguments, TaggedArguments):
        arguments = _tagged(writer, form.arguments, tool, number)
    else:
        arguments = writer.part(f"arguments_{number}", of_schema(_object(tool.parameters)))
    ends = " | ".join(map(writer.literal, form.ends))
    return f"{writer.template(form.heads[0], name=tool.name)} {writer.gap} {arguments}" + (
        f" ({writer.gap} ({ends}))*" if ends else ""
    )


def _tagged(writer: LarkWriter, form: TaggedArguments, tool: Tool, number: int) -> str:
    """Arguments in the order of the schema; those that it does not require may be left out."""
    written = []
    required = tool.parameters.get("required", ())
    for i, (key, given) in enumerate(tool.parameters.get("properties", {}).items()):
        schema = given if isinstance(given, dict) else {}
        name = f"argument_{number}_{i}"
        text = "string" in argument_types(tool.parameters, key)
        head = writer.template(form.argument, key=key, word="true" if text else "false")
        if not text:
            value = writer.part(name, of_schema({**_definitions(tool.parameters), **schema}))
            value = f"{writer.gap} {value} {writer.gap} {writer.literal(form.close)}"
        elif "enum" in schema:
            words = " | ".join(writer.literal(_bare(word)) for word in schema["enum"])
            line = r"/\n?/" if form.lines else ""
            value = f"{line} ({words}) {line} {writer.literal(form.close)}"
        else:
            if tool.strict and not schema.keys() <= REMARKS:
                raise UnsupportedError(
                    f"'{key}' of '{tool.name}' is a string with conditions, which cannot be enforced in this "
                    f"model's format of calls",
                    "tools",
                )
            value = writer.up_to(f"{name}_text", form.close)
        argument = writer.rule(name, f"{head} {value} {writer.gap}")
        written.append(argument if key in required else f"{argument}?")
    return " ".join([*written, writer.literal(form.end)])


def _bare(value: Any) -> str:
    """As it stands between tags."""
    return value if isinstance(value, str) else json.dumps(value)


def _object(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **parameters}


def _definitions(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """References are from the root of the schema of which the tool's becomes a part."""
    return {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
