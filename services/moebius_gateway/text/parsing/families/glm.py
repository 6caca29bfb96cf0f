"""GLM-4.5 and later: name, keys and values as tags; before 4.7 on lines of their own."""

from moebius_gateway.text.parsing.spec import THINK, NamedCall, ParserSpec, Rule, TaggedArguments

GLM = ParserSpec(
    name="glm",
    rules=(
        THINK,
        Rule(
            "<tool_call>",
            (
                NamedCall(
                    (" {name}",),
                    TaggedArguments(
                        "<arg_key>{key}</arg_key> <arg_value>", close="</arg_value>", end="</tool_call>"
                    ),
                ),
            ),
        ),
    ),
    signs=(("<arg_key>", "<arg_value>"),),
    model_types=("glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
)
