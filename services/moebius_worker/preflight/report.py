"""What the sacrificial process says, a line of JSON each."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from moebius_kernels.plan import Verdict


@dataclass(frozen=True, slots=True)
class Site:
    """An operation's calls with one key: those with `tokens`, in steps of a `kind` if that matters."""

    operation: str
    key: str
    tokens: int
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """A candidate is being tried; it takes more than `seconds` only if it hangs."""

    site: Site
    backend: str
    gate: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Judged:
    site: Site
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class StepDone:
    """Everything in the first `done` of `total` steps has been judged."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Doing:
    """For people: what takes the time."""

    phase: str


@dataclass(frozen=True, slots=True)
class Compiled:
    """What could be compiled ahead is: all `kernels` that were found but `failed` ones. `unfinished`: steps
    that raised, so that nobody knows what else they launch. `reason`: of the first that went wrong."""

    kernels: int
    failed: int = 0
    unfinished: int = 0
    reason: str = ""

    def __str__(self) -> str:
        said = f"{self.kernels - self.failed} of {self.kernels} kernels compiled"
        said += f", {self.failed} failed" if self.failed else ""
        said += f", {self.unfinished} steps not followed to their ends" if self.unfinished else ""
        return f"{said}: {self.reason}" if self.reason else said


@dataclass(frozen=True, slots=True)
class RanOut:
    """The process ends, for want of the GPU's memory; `said`: by the device."""

    said: str


Message = Begun | Judged | StepDone | Doing | Compiled | RanOut
_KINDS = {kind.__name__: kind for kind in (Begun, Judged, StepDone, Doing, Compiled, RanOut)}


def encode(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)]).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises ValueError for what `encode` did not write."""
    try:
        name, found = json.loads(line)
        fields: dict[str, Any] = dict(found)
        if "site" in fields:
            fields["site"] = Site(**fields["site"])
        if "verdict" in fields:
            fields["verdict"] = Verdict(**fields["verdict"])
        message: Message = _KINDS[name](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no report: {line[:200]!r}") from error
    return message
