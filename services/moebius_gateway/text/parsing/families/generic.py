"""Models of which no more is known than that they think between tags, or not even that."""

from moebius_gateway.text.parsing.spec import THINK, ParserSpec

THINKING = ParserSpec(name="think", rules=(THINK,), signs=(("<think>",), ("</think>",)))
PLAIN = ParserSpec(name="plain")
