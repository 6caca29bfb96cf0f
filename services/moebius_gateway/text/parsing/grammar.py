"""A description made ready for reading: which markers there are where, and what may follow each."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from moebius_gateway.text.parsing.spec import Channel, Form, JsonCall, ParserSpec, Region, Rule
from moebius_gateway.text.parsing.templates import SPACE, Pattern, compiled

JSON_START = Pattern(re.compile(rf"{SPACE}(?=[{{\[])"), re.compile(SPACE))
BARE_KEYS = ("name", "type", "id", "arguments", "parameters")

Choices = tuple[tuple[Pattern, Form], ...]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Markers are those of every state; `beginning` and `anywhere` are the ones that open a rule."""

    rules: dict[str, tuple[Rule, Choices]]
    start: Choices
    beginning: frozenset[str]
    anywhere: frozenset[str]
    dropped: frozenset[str]
    # Close some channel.
    closing: frozenset[str]
    # Close the reasoning that the prompt opened. Empty: there is none.
    closing_reasoning: frozenset[str]


@cache
def grammar_of(spec: ParserSpec, *, calls: bool) -> Grammar:
    """Without `calls`, what would be a call is text."""

    def allowed(forms: Iterable[Form]) -> tuple[Form, ...]:
        return tuple(form for form in forms if calls or isinstance(form, Channel))

    rules = {rule.open: (rule, _choices(forms)) for rule in spec.rules if (forms := allowed(rule.forms))}
    channels = [form for rule in spec.rules for form in rule.forms if isinstance(form, Channel)]
    closing = {region: set[str]() for region in Region}
    for channel in channels:
        closing[channel.region].update(channel.close or spec.dropped)
    return Grammar(
        rules=rules,
        start=_choices(allowed(spec.start)),
        beginning=frozenset(rules),
        anywhere=frozenset(open for open, (rule, _) in rules.items() if not rule.beginning),
        dropped=frozenset(spec.dropped),
        closing=frozenset().union(*closing.values()),
        closing_reasoning=frozenset(closing[Region.REASONING]),
    )


def _choices(forms: Iterable[Form]) -> Choices:
    return tuple((pattern, form) for form in forms for pattern in _patterns(form))


def _patterns(form: Form) -> Iterable[Pattern]:
    if not isinstance(form, JsonCall):
        return map(compiled, form.heads)
    if not form.bare:
        return (JSON_START,)
    keys = [compiled(f' {{ "{key}"') for key in BARE_KEYS]
    return (Pattern(re.compile(rf"(?={key.full.pattern})"), key.partial) for key in keys)
