"""Qwen3-Coder, Qwen3.5, Nemotron 3: functions and parameters as tags. The outer tag is often forgotten."""

from moebius_gateway.text.parsing.spec import THINK, NamedCall, ParserSpec, Rule, TaggedArguments

PARAMETERS = TaggedArguments("<parameter={key}>", close="</parameter>", end="</function>", lines=True)

QWEN3_CODER = ParserSpec(
    name="qwen3_coder",
    rules=(
        THINK,
        Rule(
            "<tool_call>",
            (NamedCall((" <function={name}>",), PARAMETERS),),
            close=("</tool_call>",),
            several=True,
        ),
        Rule("<function=", (NamedCall(("{name}>",), PARAMETERS),), close=("</tool_call>",)),
    ),
    signs=(("<tool_call>", "<function=", "<parameter="),),
)
