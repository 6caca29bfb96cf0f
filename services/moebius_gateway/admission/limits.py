"""What a client may have, and what all together may have: plain data."""

from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """The smaller, the more urgent. The numbers are what workers get."""

    HIGH = -1
    NORMAL = 0
    LOW = 1


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Of one API key; None: no limit of its own.

    `max_concurrent`: sequences that are generated at the same time; what is over it waits for its turn.
    Rates: what is over them is refused, and told when to come back; bursts may use up a minute's worth.
    """

    priority: Priority = Priority.NORMAL
    max_concurrent: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


@dataclass(frozen=True, slots=True)
class Client:
    """Who asks. `name` is that of an API key; "" while there are none."""

    name: str = ""
    limits: ClientLimits = ClientLimits()


@dataclass(frozen=True, slots=True)
class GateOptions:
    """`max_waiting`: sequences. `max_wait`: seconds; what is predicted to wait longer is refused at once."""

    max_waiting: int = 1024
    max_wait: float = 60.0
