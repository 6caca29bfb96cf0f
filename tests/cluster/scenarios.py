"""Scenarios as data: what happens while streams run, and what must be so afterwards."""

from dataclasses import dataclass


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
    # Whether the pods of workers have to be others, or restarted, afterwards.
    new_pods: bool = False
    restarts: bool = False


# A worker that says nothing is given up by gateways after 5 s; one that is alone has to come back first.
SCENARIOS = (
    Scenario("engine killed", (Event("kill engine"),)),
    Scenario("worker killed", (Event("kill worker"),), restarts=True),
    Scenario("pod deleted", (Event("delete pod"),), new_pods=True),
    Scenario("pod killed", (Event("kill pod"),), new_pods=True),
    Scenario("pod evicted", (Event("evict"),), new_pods=True),
    Scenario("worker stopped", (Event("stop worker"),)),
    Scenario("out of memory", (Event("out of memory"),)),
    Scenario("leader of the controllers killed", (Event("kill leader"),), max_gap=5),
    Scenario("API server stopped", (Event("stop API server"),), max_gap=5),
    Scenario("gateways cut off from a worker", (Event("partition"),)),
    Scenario("gateways restarted", (Event("restart gateways"),), max_gap=10),
    Scenario("workers restarted", (Event("restart workers"),), new_pods=True),
    Scenario(
        "worker killed while the API server is away", (Event("stop API server"), Event("kill worker", 800))
    ),
    Scenario("only worker killed", (Event("kill worker"),), workers=1, max_gap=60, restarts=True),
    Scenario("only pod deleted", (Event("delete pod"),), workers=1, max_gap=60, new_pods=True),
)
