"""Gemma 4: a thought channel, and calls in a notation of their own. All markers are special tokens."""

from moebius_gateway.text.parsing.spec import Channel, NamedCall, ParserSpec, QuotedArguments, Region, Rule

GEMMA4 = ParserSpec(
    name="gemma4",
    rules=(
        Rule("<|channel>", (Channel(Region.REASONING, ("thought\n", "thought"), close=("<channel|>",)),)),
        Rule(
            "<|tool_call>",
            (NamedCall((" call:{name}",), QuotedArguments('<|"|>')),),
            close=("<tool_call|>",),
            several=True,
        ),
    ),
    dropped=("<channel|>", "<|tool_response>", "<turn|>"),
    signs=(("<|tool_call>", "<|channel>"),),
    tokens=("<|tool_call>", "<|channel>"),
    model_types=("gemma4", "gemma4_text"),
)
