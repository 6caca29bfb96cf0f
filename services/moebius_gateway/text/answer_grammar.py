"""The grammar of a whole answer in a family's format: reasoning, then calls or what the client wants to read.

Written from the same description by which answers are read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moebius_gateway.text.call_grammar import UnsupportedError, calls, text_with_calls
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.grammar import ANY_TEXT, Part
from moebius_gateway.text.lark import GAP, LarkWriter
from moebius_gateway.text.parsing.families.harmony import HARMONY
from moebius_gateway.text.parsing.spec import Channel, ParserSpec, Region

# What harmony writes between two messages, and before the one that the client reads.
HARMONY_BETWEEN = "<|start|>assistant"
HARMONY_SAID = "<|channel|>final<|message|>"


@dataclass(frozen=True, slots=True)
class Demands:
    """What an answer must keep to.

    `answer`: what is said must be of it; None: anything. `tools`: those whose calls must keep to their
    parameters. `must_call`: there is nothing but calls. `one_call`: of them at most one. `reasoning_budget`:
    tokens; None: any number.
    """

    answer: Part | None = None
    tools: Sequence[Tool] = ()
    must_call: bool = False
    one_call: bool = False
    reasoning_budget: int | None = None


def answer_grammar(
    spec: ParserSpec, special_tokens: Mapping[str, int], demands: Demands, *, in_reasoning: bool
) -> str:
    """Raises `UnsupportedError`. `in_reasoning`: the prompt ends inside of reasoning."""
    writer = LarkWriter(special_tokens)
    harmony = spec is HARMONY
    body = _body(writer, spec, demands)
    reasoning = _reasoning(writer, spec, demands.reasoning_budget, in_reasoning=in_reasoning)
    between = f" {GAP} {writer.literal(HARMONY_BETWEEN)}" if harmony and reasoning else ""
    if not reasoning:
        return writer.written(body)
    thought = f"{reasoning}{between} {GAP}"
    return writer.written(f"{thought} {body}" if in_reasoning else f"({thought})? {body}")


def _body(writer: LarkWriter, spec: ParserSpec, demands: Demands) -> str:
    tools, one = demands.tools, demands.one_call
    if demands.must_call:
        return f"{calls(writer, spec, tools, one=one)} {GAP}"
    if demands.answer is None:
        return text_with_calls(writer, spec, tools, one=one) if tools else writer.rule("rest", ANY_TEXT)
    said = writer.part("wanted", demands.answer)
    if spec is HARMONY:
        said = f"{writer.literal(HARMONY_SAID)} {said}"
    return f"({calls(writer, spec, tools, one=one)} {GAP} | {said})" if tools else said


def _reasoning(writer: LarkWriter, spec: ParserSpec, budget: int | None, *, in_reasoning: bool) -> str:
    """Empty if the family does not reason."""
    ways: list[str] = []
    for rule in spec.rules:
        for form in rule.forms:
            if isinstance(form, Channel) and form.region is Region.REASONING:
                close = (form.close or spec.dropped)[0]
                rest = writer.up_to(f"thought_{len(ways)}", close, budget)
                head = "" if in_reasoning else f"{writer.literal(rule.open + form.heads[0])} "
                ways.append(head + rest)
    if not ways and budget is not None:
        raise UnsupportedError("this model does not reason", "thinking.budget_tokens")
    return f"{GAP} ({' | '.join(ways)})" if ways else ""
