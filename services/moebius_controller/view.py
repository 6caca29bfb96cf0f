"""What a driver sees at one moment."""

from collections.abc import Sequence
from dataclasses import dataclass

from moebius_controller.types import Observation


@dataclass(frozen=True, slots=True)
class View:
    observations: Sequence[Observation]
    # Nodes that are marked, whether workers are there or not; None: nodes are not known, and
    # none can be marked.
    marked_nodes: frozenset[str] | None = frozenset()
    # Why nothing may be done now; empty if it may. Somebody else leads, or what is seen is out of date.
    hands_off: str = ""
    # Counts the times that this controller became the leader: what it remembers from before is out of date.
    term: int = 1
