"""Heads of markers with variable parts, matched as they come.

A template is literal text with slots (`<function={name}>`); a space in it stands for any short white space.
"""

import re
from dataclasses import dataclass
from functools import cache

# Lengths are bounded, so that text which only looks like a head is not held back for long.
SLOTS = {
    "name": r"[\w.:/-]{1,128}",
    "key": r'[^<>"\n]{1,256}',
    "word": r"\w{0,32}",
    "header": r"[^<>|]{0,256}",
}
# More than grammars let through: a gap between markers and the white space of JSON (`GAP`, `WHITESPACE`).
SPACE = r"\s{0,80}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """`full` matches the whole head, `partial` every beginning of it."""

    full: re.Pattern[str]
    partial: re.Pattern[str]


@cache
def compiled(template: str) -> Pattern:
    """A slot at the end reaches up to the first character that cannot belong to it."""
    atoms: list[str] = []
    groups: list[str] = []
    ending = ""
    for part in re.findall(r"\{\w+\}|[\s\S]", template):
        if len(part) > 1:
            name = part[1:-1]
            atoms.append(SLOTS[name])
            groups.append(f"(?P<{name}>{SLOTS[name]})")
            ending = rf"(?!{SLOTS[name].partition('{')[0]})(?=[\s\S])"
        else:
            atom = SPACE if part == " " else re.escape(part)
            atoms.append(atom)
            groups.append(atom)
            ending = ""
    partial = ""
    for atom in reversed(atoms):
        partial = rf"(?:{atom}{partial})?"
    return Pattern(re.compile("".join(groups) + ending), re.compile(partial))
