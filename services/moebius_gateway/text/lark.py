"""Pieces of a Lark grammar in a family's markers, collected while it is written."""

import re
from collections.abc import Mapping

from moebius_gateway.text.grammar import ANY_TEXT, Part, composed, escaped, quoted

# White space that most families let stand between markers and what they enclose.
GAP = r"/[ \t\n]{0,4}/"


class LarkWriter:
    """Markers that are special tokens are written as their ids, since the sampler sees no text in them."""

    def __init__(self, special_tokens: Mapping[str, int], *, gaps: bool) -> None:
        """`special_tokens`: text to id. `gaps`: white space may stand between markers."""
        # What stands for it, in rules and for the spaces of templates.
        self.gap = GAP if gaps else ""
        self._space = GAP if gaps else quoted(" ")
        self._special = special_tokens
        self._splitter = re.compile("(" + "|".join(map(re.escape, special_tokens)) + ")")
        self._rules: dict[str, str] = {}
        self._parts: dict[str, Part] = {}

    def rule(self, name: str, body: str) -> str:
        """`name` may carry attributes; returns what stands for the rule in others."""
        plain = name.partition("[")[0]
        self._rules[plain] = f"{name}: {body}"
        return plain

    def part(self, name: str, part: Part) -> str:
        """Takes in a grammar of its own; returns what stands for it."""
        self._parts[name] = part
        return f"@{name}"

    def literal(self, text: str) -> str:
        """Exactly this text."""
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else quoted(piece)
            for piece in (self._splitter.split(text) if self._special else [text])
            if piece
        )

    def template(self, template: str, **slots: str) -> str:
        """A template of a family's description: slots filled (or empty), spaces as white space."""
        pieces = [re.sub(r"\{(\w+)\}", lambda slot: slots.get(slot[1], ""), p) for p in template.split(" ")]
        return f" {self._space} ".join(filter(None, map(self.literal, pieces)))

    def up_to(self, name: str, marker: str, max_tokens: int | None = None) -> str:
        """Any text, at most of so many tokens, and the first `marker` behind it."""
        limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
        if marker in self._special:
            return f"{self.rule(name + limit, ANY_TEXT)} {self.literal(marker)}"
        if max_tokens is None:
            return self.rule(f"{name}[lazy]", f"/(.|\\n)*{escaped(marker)}/")
        # A limit cuts off a lazy rule's marker too. As a grammar of its own it ends before.
        text = self.rule(name + limit, self.part(f"{name}_text", _without(marker)))
        return f"{text} {self.literal(marker)}"

    def text(self, name: str, close: str, condition: str | None = None, barred: str | None = None) -> str:
        """Text without `barred` (left out: without `close`), and `close` behind it.

        `condition`: an expression of terminals that the text must be.
        """
        token = next((token for token in self._special if close.startswith(token)), None)
        if condition is None and barred is None and token is None:
            return self.up_to(name, close)
        # Nor may it spell a special token: the reader sees no difference.
        without = f"~/(.|\\n)*{escaped(barred or token or close)}(.|\\n)*/"
        text = f"({condition or ANY_TEXT} & {without})"
        if token is not None:
            return f"{self.rule(name.upper(), text)} {self.literal(close)}"
        # One terminal: the lexer would not give back what began like the end.
        return self.rule(name.upper(), f"{text} {quoted(close)}")

    def written(self, start: str) -> str:
        return composed("\n".join([f"start: {start}", *self._rules.values()]), self._parts)


def _without(marker: str) -> Part:
    """Text in which `marker` does not occur, nor a beginning of it before another (`</thin</think>`)."""
    first = escaped(marker[0])
    beginnings = [
        f"{first}+{escaped(marker[1:i])}[^{escaped(marker[i])}{first}]" for i in range(1, len(marker))
    ]
    lines = ("start: (OTHER | BEGINNING)*", f"OTHER: /[^{first}]+/", f"BEGINNING: /{'|'.join(beginnings)}/")
    return {"lark_grammar": "\n".join(lines)}
