"""Pieces of a Lark grammar in a family's markers, collected while it is written."""

import re
from collections.abc import Mapping

from moebius_gateway.text.grammar import ANY_TEXT, Part, composed, escaped, quoted

# Between markers and what they enclose; also what a space in a template stands for.
GAP = r"/[ \t\n]{0,8}/"


class LarkWriter:
    """Markers that are special tokens are written as their ids, since the sampler sees no text in them."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        """`special_tokens`: text to id."""
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
        """A template of a family's description: slots filled (or empty), spaces short white space."""
        for name, value in slots.items():
            template = template.replace(f"{{{name}}}", value)
        template = re.sub(r"\{\w+\}", "", template)
        return f" {GAP} ".join(filter(None, map(self.literal, template.split(" "))))

    def up_to(self, name: str, marker: str, max_tokens: int | None = None) -> str:
        """Any text, and the first `marker` behind it."""
        if max_tokens is not None or marker in self._special:
            # A limit would cut off the marker too, so that stands apart.
            limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
            return f"{self.rule(name + limit, ANY_TEXT)} {self.literal(marker)}"
        return self.rule(f"{name}[lazy]", f"/(.|\\n)*{escaped(marker)}/")

    def written(self, start: str) -> str:
        return composed("\n".join([f"start: {start}", *self._rules.values()]), self._parts)
