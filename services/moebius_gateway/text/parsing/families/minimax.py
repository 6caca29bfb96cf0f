"""MiniMax. M1 writes a block of JSON calls, M2 of invocations with parameters as tags, M3 as nested tags."""

from moebius_gateway.text.parsing.spec import (
    THINK,
    Channel,
    JsonCall,
    NamedCall,
    NestedArguments,
    ParserSpec,
    Region,
    Rule,
    TaggedArguments,
)

MINIMAX_M1 = ParserSpec(
    name="minimax_m1",
    rules=(THINK, Rule("<tool_calls>", (JsonCall(),), close=("</tool_calls>",), several=True)),
    signs=(("<tool_calls>", '"arguments": '),),
    model_types=("minimax", "minimax_m1"),
)

MINIMAX = ParserSpec(
    name="minimax",
    rules=(
        THINK,
        Rule(
            "<minimax:tool_call>",
            (
                NamedCall(
                    (' <invoke name="{name}">',),
                    TaggedArguments('<parameter name="{key}">', close="</parameter>", end="</invoke>"),
                ),
            ),
            close=("</minimax:tool_call>",),
            several=True,
        ),
    ),
    signs=(("<minimax:tool_call>", "<invoke name="),),
    tokens=("<minimax:tool_call>",),
    model_types=("minimax_m2",),
)

# A special token before each tag.
MARK = "]<]minimax[>["

MINIMAX_M3 = ParserSpec(
    name="minimax_m3",
    rules=(
        Rule("<mm:think>", (Channel(Region.REASONING, close=("</mm:think>",)),), beginning=True),
        Rule(
            f"{MARK}<tool_call>",
            (NamedCall((f' {MARK}<invoke name="{{name}}">',), NestedArguments(MARK, end="</invoke>")),),
            close=(f"{MARK}</tool_call>",),
            several=True,
        ),
    ),
    signs=((MARK, "<invoke name="),),
    tokens=(MARK,),
    model_types=("minimax_m3", "minimax_m3_vl"),
)
