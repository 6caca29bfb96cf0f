"""Mistral: a token before a list of JSON calls (until 2024), or before each name (since)."""

from moebius_gateway.text.parsing.spec import (
    THINK,
    Channel,
    JsonArguments,
    JsonCall,
    NamedCall,
    ParserSpec,
    Region,
    Rule,
)

MISTRAL = ParserSpec(
    name="mistral",
    rules=(
        THINK,  # Magistral 2506
        Rule("[THINK]", (Channel(Region.REASONING, close=("[/THINK]",)),)),
        Rule(
            "[TOOL_CALLS]",
            (
                JsonCall(),
                NamedCall((" {name}[ARGS]", " {name}[CALL_ID]{word}[ARGS]", " {name}"), JsonArguments()),
            ),
        ),
    ),
    dropped=("[/THINK]",),
    short_ids=True,
    signs=(("[TOOL_CALLS]",),),
    tokens=("[TOOL_CALLS]",),
)
