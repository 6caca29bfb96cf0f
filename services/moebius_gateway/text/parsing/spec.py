"""The words in which a family's format is described. A description is data; what reads it is in stream.py."""

from dataclasses import dataclass
from enum import Enum


class Region(Enum):
    CONTENT = "content"
    REASONING = "reasoning"


@dataclass(frozen=True, slots=True)
class Channel:
    """Behind the rule's marker and one of `heads` (templates) stands text of a region, up to `close`."""

    region: Region
    heads: tuple[str, ...] = ("",)
    close: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JsonArguments:
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class QuotedArguments:
    """An object like JSON's, with bare keys, and strings between two `quote` without escapes."""

    quote: str


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Each argument is a template with {key}, the bare value, and `close`; `end` stands behind the last.

    Values get the types that the tool's schema gives them; where the template has a {word}, it says whether
    the value is a string ("true") or JSON ("false"). `lines`: a line feed on either side of the value
    belongs to the tags.
    """

    argument: str
    close: str
    end: str
    lines: bool = False


@dataclass(frozen=True, slots=True)
class NestedArguments:
    """Arguments as tags that are named like their keys, each behind `mark`; `end` (too) behind the last.

    The tags of an object's or a list's parts stand in its own; those of a list are named `item`.
    """

    mark: str
    end: str
    item: str = "item"


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A call whose name stands in its head; any of `ends` may stand behind its arguments."""

    heads: tuple[str, ...]
    arguments: JsonArguments | QuotedArguments | TaggedArguments | NestedArguments
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JsonCall:
    """A call, or several, each a JSON object with name and arguments. A brace too many is dropped.

    `bare`: no marker tells it from a JSON answer, so its name must be that of an offered tool, and it has no
    fields that a call has not.
    """

    bare: bool = False
    ends: tuple[str, ...] = ("}",)


Form = Channel | NamedCall | JsonCall


@dataclass(frozen=True, slots=True)
class Rule:
    """What may follow the marker `open`: the first form that fits.

    `close` ends calls (it may be missing). `several`: more calls may follow before it. `beginning`: the
    marker counts only where an answer, or a part of it behind a marker, begins; elsewhere it is text.
    """

    open: str
    forms: tuple[Form, ...]
    close: tuple[str, ...] = ()
    several: bool = False
    beginning: bool = False


@dataclass(frozen=True, slots=True)
class ParserSpec:
    """A family's format.

    `start`: forms that may begin what is said without a marker, behind reasoning if there is any. `dropped`:
    markers that are never text, and end whatever they stand in.

    A family is recognised by any of `signs`: strings that are all in the chat template. Where the template
    says nothing, by `tokens`, all among the special tokens, or by the `model_type` of the config.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    start: tuple[Form, ...] = ()
    dropped: tuple[str, ...] = ()
    # The family's templates demand call ids of nine letters and digits.
    short_ids: bool = False
    signs: tuple[tuple[str, ...], ...] = ()
    tokens: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()


# Most families' reasoning. In the middle of an answer the tag is something the model talks about.
THINK = Rule("<think>", (Channel(Region.REASONING, close=("</think>",)),), beginning=True)
