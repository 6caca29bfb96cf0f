"""Hermes 2 and 3, Qwen2.5, Qwen3, Granite 4 and many more: JSON between tags."""

from moebius_gateway.text.parsing.spec import THINK, JsonCall, ParserSpec, Rule

HERMES = ParserSpec(
    name="hermes",
    rules=(THINK, Rule("<tool_call>", (JsonCall(),), close=("</tool_call>",))),
    signs=(("<tool_call>", '"arguments"'),),
)
