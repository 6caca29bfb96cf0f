"""The grammar of a whole answer in a family's format: reasoning, then calls or what the client wants to read.

Written from the same description by which answers are read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moebius_gateway.text.call_grammar import calls, text_with_calls
from moebius_gateway.text.conversation import Tool
from moebius_gateway.text.errors import UnsupportedError
from moebius_gateway.text.grammar import ANY_TEXT, Part
from moebius_gateway.text.lark import LarkWriter
from moebius_gateway.text.parsing.families.harmony import HARMONY
from moebius_gateway.text.parsing.spec import Channel, ParserSpec, Region, Rule

# What harmony writes between two messages.
HARMONY_BETWEEN = "<|start|>assistant"


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
    spec: ParserSpec,
    special_tokens: Mapping[str, int],
    demands: Demands,
    *,
    in_reasoning: bool,
    reasoned: bool = False,
) -> str:
    """Raises `UnsupportedError`. The prompt ends inside (`in_reasoning`) or behind (`reasoned`) reasoning."""
    harmony = spec is HARMONY
    writer = LarkWriter(special_tokens, gaps=not harmony)
    # After a call harmony's models stop.
    demands = replace(demands, one_call=True) if harmony else demands
    body = _body(writer, spec, demands)
    reasoning = _reasoning(writer, spec, demands.reasoning_budget, in_reasoning=in_reasoning)
    if not reasoning or reasoned:
        return writer.written(body)
    between = writer.literal(HARMONY_BETWEEN) if harmony else writer.gap
    thought = f"{reasoning} {between}"
    # A limit binds only those who must reason.
    must = in_reasoning or demands.reasoning_budget is not None
    return writer.written(f"{thought} {body}" if must else f"({thought})? {body}")


def _body(writer: LarkWriter, spec: ParserSpec, demands: Demands) -> str:
    tools, one = demands.tools, demands.one_call
    if demands.must_call:
        return f"{calls(writer, spec, tools, one=one)} {writer.gap}"
    channel = next(_channels(spec, Region.CONTENT), None)
    if tools and demands.answer is None and channel is None:
        return text_with_calls(writer, spec, tools, one=one)
    wanted = demands.answer
    said = writer.rule("rest", ANY_TEXT) if wanted is None else writer.part("wanted", wanted)
    if channel is not None:
        rule, form = channel
        said = f"{writer.literal(rule.open + form.heads[0])} {said}"
    return f"({calls(writer, spec, tools, one=one)} {writer.gap} | {said})" if tools else said


def _reasoning(writer: LarkWriter, spec: ParserSpec, budget: int | None, *, in_reasoning: bool) -> str:
    """Empty if the family does not reason."""
    ways: list[str] = []
    for rule, channel in _channels(spec, Region.REASONING):
        rest = writer.up_to(f"thought_{len(ways)}", channel.close[0], budget)
        head = "" if in_reasoning else f"{writer.literal(rule.open + channel.heads[0])} "
        ways.append(head + rest)
    if not ways and budget is not None:
        raise UnsupportedError("this model does not reason", "thinking.budget_tokens")
    return f"{writer.gap} ({' | '.join(ways)})" if ways else ""


def _channels(spec: ParserSpec, region: Region) -> Iterator[tuple[Rule, Channel]]:
    """Those that have an end of their own."""
    for rule in spec.rules:
        for form in rule.forms:
            if isinstance(form, Channel) and form.region is region and form.close:
                yield rule, form
