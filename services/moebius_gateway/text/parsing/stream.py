"""Reads an answer as it comes, by a family's description.

What could become a marker is held back, and no more; line feeds next to a marker belong to it. Where the text
is cut makes no difference. Nothing raises: what is not what the format says is text.
"""

import re
from collections.abc import Mapping
from typing import Any

from moebius_gateway.text.parsing.events import Event
from moebius_gateway.text.parsing.grammar import Choices, grammar_of
from moebius_gateway.text.parsing.json_call import read_arguments, read_json_call
from moebius_gateway.text.parsing.nested_arguments import read_nested
from moebius_gateway.text.parsing.output import Output
from moebius_gateway.text.parsing.quoted_arguments import read_quoted
from moebius_gateway.text.parsing.source import (
    EndOfTextError,
    MalformedError,
    Markers,
    Reading,
    Source,
    markers,
)
from moebius_gateway.text.parsing.spec import (
    Channel,
    JsonArguments,
    JsonCall,
    NamedCall,
    NestedArguments,
    ParserSpec,
    QuotedArguments,
    Region,
    Rule,
)
from moebius_gateway.text.parsing.tagged_arguments import read_tagged
from moebius_gateway.text.parsing.templates import Pattern

SEPARATOR = Pattern(re.compile(r"\s{0,16}[,;]\s{0,16}(?=\{)"), re.compile(r"\s{0,16}(?:[,;]\s{0,16})?"))


def parser_for(
    spec: ParserSpec,
    tools: Mapping[str, Mapping[str, Any]],
    *,
    started_in_reasoning: bool,
    continued: bool = False,
) -> "StreamParser":
    """A parser for one answer.

    `tools`: of each offered tool's name, the JSON schema of its parameters. Without tools, what looks like a
    call is text. `started_in_reasoning`: the prompt ends inside of reasoning (`opens_reasoning`).
    `continued`: it ends in the middle of what is said.
    """
    return StreamParser(spec, tools, started_in_reasoning=started_in_reasoning, continued=continued)


class StreamParser:
    """Every `feed` costs what its text costs, however long the answer is.

    A call is given on when its name is known and its arguments begin. One that turns out malformed before is
    given back as text of where it stood; one that does so later gets no `ToolCallEnd`, and all of its text
    follows. Names that are not among the tools are given on: the client can tell the model.
    """

    def __init__(
        self,
        spec: ParserSpec,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        started_in_reasoning: bool,
        continued: bool = False,
    ) -> None:
        self._tools = tools
        self._grammar = grammar_of(spec, calls=bool(tools))
        self._started_in_reasoning = started_in_reasoning and bool(self._grammar.closing_reasoning)
        self._closing = self._grammar.closing_reasoning if self._started_in_reasoning else frozenset[str]()
        # Markers that may still close the calls before.
        self._closing_calls = frozenset[str]()
        self._source = Source()
        region = Region.REASONING if self._started_in_reasoning else Region.CONTENT
        self._out = Output(region, short_ids=spec.short_ids)
        # Whether what is said begins here, so that it may be a call without a marker.
        self._saying_begins = not self._started_in_reasoning and not continued
        self._truncated = False
        # While text is passed on: what finds the marker that ends that.
        self._passing: Markers | None = None
        self._run = self._answer(beginning=not continued)

    def feed(self, text: str) -> list[Event]:
        """The answer goes on with `text`."""
        if self._passing is not None and self._is_plain(text, self._passing):
            return [self._out.plain(text)]
        self._source.add(text)
        next(self._run)
        return self._out.drain()

    def finish(self, *, truncated: bool) -> list[Event]:
        """The answer is over; gives what was held back. The parser is of no further use.

        `truncated`: it was cut at a limit. A call that is not whole then stays as it is: without its end if
        it has started, else it is left out. In an answer that ended by itself it is malformed.
        """
        self._source.ended = True
        self._truncated = truncated
        for _ in self._run:
            pass
        return self._out.drain()

    def _is_plain(self, text: str, marker: Markers) -> bool:
        """Whether nothing is kept back, and nothing of `text` would be. Most text is so: a fast way."""
        source, end = self._source, len(text)
        return (
            end > 0
            and source.at == len(source.text)
            and self._out.is_empty
            and "\n" not in text
            and marker.find(text, 0) == (end, end)
        )

    def _answer(self, *, beginning: bool) -> Reading[None]:
        behind_marker = self._started_in_reasoning
        while not (self._source.ended and self._source.at == len(self._source.text)):
            if self._saying_begins and self._grammar.start:
                self._saying_begins = False
                self._source.clear()
                beginning = yield from self._forms(self._grammar.start, None)
                continue
            if beginning:
                marker = yield from self._marker_at_beginning(behind_marker)
            else:
                marker = yield from self._next_marker()
            beginning = behind_marker = marker is not None and (yield from self._marker(marker))
        self._out.end_lines()

    def _marker_at_beginning(self, behind_marker: bool) -> Reading[str | None]:
        """The marker that comes next; None if something else does."""
        grammar, source = self._grammar, self._source
        source.clear()
        yield from source.skip_white()
        white = source.taken()
        self._out.hold(white.lstrip("\n") if behind_marker else white)
        source.clear()
        return (
            yield from source.accept(
                grammar.beginning | grammar.dropped | grammar.closing | self._closing_calls
            )
        )

    def _next_marker(self) -> Reading[str | None]:
        """Passes text on up to the next marker; None at the end."""
        grammar, source, out = self._grammar, self._source, self._out
        here = markers(grammar.anywhere | grammar.dropped | self._closing | self._closing_calls)
        while True:
            start, end = here.find(source.text, source.at)
            out.text(source.take(start))
            source.clear()
            if end > start:
                return source.take(end)
            if source.ended:
                out.text(source.take(len(source.text)))
                return None
            self._passing = here
            yield
            self._passing = None

    def _marker(self, marker: str) -> Reading[bool]:
        """Reads what follows a marker. Says whether something begins behind it; else it was text."""
        if marker in self._grammar.rules:
            rule, choices = self._grammar.rules[marker]
            return (yield from self._forms(choices, rule))
        if marker in self._closing_calls:
            self._closing_calls -= {marker}
        else:
            self._saying_begins = self._out.region is Region.REASONING
            self._out.region = Region.CONTENT
            self._closing = frozenset()
        self._out.drop_lines()
        return True

    def _forms(self, choices: Choices, rule: Rule | None) -> Reading[bool]:
        # Whether what is cut short was certainly a call.
        sure = rule is not None
        try:
            again = True
            while again:
                match, form = yield from self._source.match(choices)
                if isinstance(form, Channel):
                    self._out.drop_lines()
                    self._out.region = form.region
                    self._closing = frozenset(form.close)
                    return True
                sure = sure or isinstance(form, NamedCall)
                before = self._out.whole_calls
                try:
                    yield from self._call(form, match)
                finally:
                    if self._out.whole_calls > before:
                        self._closing_calls = _closers(form, rule) - {"}"}
                again = yield from self._behind_call(form, rule)
        except MalformedError as error:
            return self._give_back(error, sure=sure)
        return True

    def _call(self, form: NamedCall | JsonCall, match: re.Match[str]) -> Reading[None]:
        if isinstance(form, JsonCall):
            yield from self._json_calls(form)
            return
        name, arguments = match["name"], form.arguments
        if isinstance(arguments, JsonArguments):
            yield from read_arguments(self._source, self._out, name)
        elif isinstance(arguments, NestedArguments):
            yield from read_nested(self._source, self._out, name, arguments, self._tools.get(name, {}))
        elif isinstance(arguments, QuotedArguments):
            yield from read_quoted(self._source, self._out, name, arguments.quote)
        else:
            yield from read_tagged(self._source, self._out, name, arguments, self._tools.get(name, {}))

    def _json_calls(self, form: JsonCall) -> Reading[None]:
        source = self._source
        listed = yield from source.accept(("[",))
        more = True
        while more:
            yield from read_json_call(source, self._out, self._tools if form.bare else None)
            try:
                yield from source.match([(SEPARATOR, None)])
            except MalformedError:
                more = False
        if listed:
            yield from source.skip_white()
            yield from source.accept(("]",))

    def _behind_call(self, form: NamedCall | JsonCall, rule: Rule | None) -> Reading[bool]:
        """Reads what closes calls. Says whether another may follow."""
        closers = _closers(form, rule)
        while True:
            yield from self._source.skip_white()
            self._source.clear()
            accepted = yield from self._source.accept(closers)
            if self._truncated:  # in one of them
                self._source.take(len(self._source.text))
            if accepted is None:
                return rule is not None and rule.several
            if rule is not None and accepted in rule.close:
                self._closing_calls = frozenset()
                return False

    def _give_back(self, error: MalformedError, *, sure: bool) -> bool:
        """What was taken since the last whole call is text. Says whether that is nothing but white space."""
        source, out = self._source, self._out
        if self._truncated and isinstance(error, EndOfTextError) and (sure or out.in_call):
            source.take(len(source.text))
            return False
        if out.in_call:
            out.abandon_call()
        text = source.taken()
        source.clear()
        if not text.strip():
            return True
        out.text(text)
        return False


def _closers(form: NamedCall | JsonCall, rule: Rule | None) -> frozenset[str]:
    return frozenset(form.ends).union(rule.close if rule else ())
