"""Llama 3.1 to 3.3: a bare JSON object in place of an answer, or one behind a token."""

from moebius_gateway.text.parsing.spec import THINK, JsonCall, ParserSpec, Rule

LLAMA3 = ParserSpec(
    name="llama3",
    rules=(THINK, Rule("<|python_tag|>", (JsonCall(),))),
    start=(JsonCall(bare=True),),
    signs=(('{"name": function name, "parameters": ',),),
    tokens=("<|python_tag|>", "<|eom_id|>"),
)
