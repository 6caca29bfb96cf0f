"""Nodes as plain data: whether they are there, marked, and well."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

# The label of a node whose GPU is broken; pods of workers are not placed where it is. The annotations say
# more.
MARK = "moebius.dev/gpu-fault"
MARK_TEXT = "moebius.dev/gpu-fault-text"
MARK_TIME = "moebius.dev/gpu-fault-time"


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    uid: str
    # Its kubelet is heard and can run pods.
    ready: bool = True
    marked: bool = False
    # What it says of its GPUs; empty if it finds them well.
    fault: str = ""


def node_of(raw: Mapping[str, Any], fault_conditions: Collection[str]) -> Node:
    """From the API's JSON. `fault_conditions`: those that, when True, say that a GPU is broken."""
    metadata = raw["metadata"]
    conditions = (raw.get("status") or {}).get("conditions") or []
    true = {one["type"]: one for one in conditions if one.get("status") == "True"}
    faults = [true[kind] for kind in fault_conditions if kind in true]
    return Node(
        name=metadata["name"],
        uid=metadata["uid"],
        ready="Ready" in true,
        marked=MARK in (metadata.get("labels") or {}),
        fault="; ".join(f"{one['type']}: {one.get('message') or one.get('reason') or ''}" for one in faults),
    )
