"""MiniMax-M2: a block of invocations with parameters as tags."""

from moebius_gateway.text.parsing.spec import THINK, NamedCall, ParserSpec, Rule, TaggedArguments

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
