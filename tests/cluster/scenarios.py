"""Scenarios as data: what happens while streams run, and what must be so afterwards."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Event:
    """A fault of tests.cluster.faults.FAULTS, once clients have seen `at_chunk` pieces."""

    fault: str
    at_chunk: int = 400


@dataclass(frozen=True)
class Scenario:
    name: str
    events: tuple[Event, ...]
    # Replicas of the model.
    workers: int = 2
    # Seconds from the fault that a client may wait for its next token at most.
    max_gap: float = 30.0
    # What of the workers has to be another afterwards: engines, containers with them, or whole pods.
    changes: Literal["nothing", "engines", "containers", "pods"] = "nothing"


# A worker that says nothing is given up by gateways after 5 s; one that is alone has to come back first.
SCENARIOS = (
    Scenario("engine killed", (Event("kill engine"),), changes="engines"),
    Scenario("worker killed", (Event("kill worker"),), changes="containers"),
    Scenario("pod deleted", (Event("delete pod"),), changes="pods"),
    Scenario("pod killed", (Event("kill pod"),), changes="pods"),
    Scenario("pod evicted", (Event("evict"),), changes="pods"),
    Scenario("worker stopped", (Event("stop worker"),), changes="containers"),
    Scenario("out of memory", (Event("out of memory"),), changes="engines"),
    Scenario("leader of the controllers killed", (Event("kill leader"),), max_gap=5),
    Scenario("API server stopped", (Event("stop API server"),), max_gap=5),
    Scenario("gateways cut off from a worker", (Event("partition"),)),
    Scenario("gateways restarted", (Event("restart gateways"),), max_gap=10),
    Scenario("workers restarted", (Event("restart workers"),), changes="pods"),
    Scenario(
        "worker killed while the API server is away",
        (Event("kill worker without API server"),),
        changes="containers",
    ),
    Scenario("only worker killed", (Event("kill worker"),), workers=1, max_gap=60, changes="containers"),
    Scenario("only pod deleted", (Event("delete pod"),), workers=1, max_gap=60, changes="pods"),
)
