"""A worker as the fleet's list has it, wherever that list comes from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """One worker that there should be.

    `address`: host:port. `name`: for people, logs and metrics. `uid`: another one at the same address is
    another worker, and nothing learnt about one holds for the other. `retiring`: it was told to go.
    """

    address: str
    name: str
    uid: str = ""
    retiring: bool = False
