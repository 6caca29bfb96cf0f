"""Kimi K2: a section of calls, each with a name and its number."""

from moebius_gateway.text.parsing.spec import THINK, JsonArguments, NamedCall, ParserSpec, Rule

KIMI = ParserSpec(
    name="kimi",
    rules=(
        THINK,
        Rule(
            "<|tool_calls_section_begin|>",
            (
                NamedCall(
                    (" <|tool_call_begin|> functions.{name}:{word} <|tool_call_argument_begin|>",),
                    JsonArguments(),
                    ends=("<|tool_call_end|>",),
                ),
            ),
            close=("<|tool_calls_section_end|>",),
            several=True,
        ),
    ),
    signs=(("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),),
    tokens=("<|tool_calls_section_begin|>",),
    model_types=("kimi_k2",),
)
