"""DeepSeek. V3 and R1 write JSON in a fenced block, V3.1 without, V3.2 and V4 tags."""

from moebius_gateway.text.parsing.spec import (
    THINK,
    JsonArguments,
    NamedCall,
    ParserSpec,
    Rule,
    TaggedArguments,
)

BEGIN = "<｜tool▁call▁begin｜>"
END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

DEEPSEEK = ParserSpec(
    name="deepseek",
    rules=(
        THINK,
        Rule(
            "<｜tool▁calls▁begin｜>",
            (
                NamedCall(
                    (f" {BEGIN}function{SEPARATOR}{{name}} ```json", f" {BEGIN}{{name}}{SEPARATOR}"),
                    JsonArguments(),
                    ends=("```", END),
                ),
            ),
            close=("<｜tool▁calls▁end｜>",),
            several=True,
        ),
    ),
    signs=(("<｜tool▁calls▁begin｜>",),),
    tokens=("<｜tool▁calls▁begin｜>",),
    model_types=("deepseek_v3",),
)

INVOKE = NamedCall(
    (' <｜DSML｜invoke name="{name}">',),
    TaggedArguments(
        '<｜DSML｜parameter name="{key}" string="{word}">',
        close="</｜DSML｜parameter>",
        end="</｜DSML｜invoke>",
    ),
)

DEEPSEEK_DSML = ParserSpec(
    name="deepseek_dsml",
    rules=(
        THINK,
        *(
            Rule(f"<｜DSML｜{block}>", (INVOKE,), close=(f"</｜DSML｜{block}>",), several=True)
            for block in ("function_calls", "tool_calls")  # V3.2, V4
        ),
    ),
    signs=(("｜DSML｜",),),
    tokens=("｜DSML｜",),
    model_types=("deepseek_v32", "deepseek_v4"),
)
