"""What is examined: a model, and steps that make it call its operations as it will when it serves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from moebius_kernels.operations import Operations
from moebius_kernels.registry import Device, TokenRange
from moebius_worker.preflight.machine import Machine

Kind = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class ProbeStep:
    """`tokens` of one request ("prefill"), one of each of so many ("decode"), or both ("mixed")."""

    kind: Kind
    tokens: int


class Subject(Protocol):
    device: Device
    machine: Machine

    def bind(self, operations: Operations) -> None:
        """What the model computes with from now on."""
        ...

    def run(self, step: ProbeStep) -> None: ...


def counts_of(span: TokenRange) -> tuple[int, ...]:
    """At which counts a range is tried: its ends, of which the first is odd. Compilers make another kernel of
    a count that is a multiple of 16, and both must have been compiled."""
    return tuple(dict.fromkeys((span.first, span.last)))


def steps_for(
    ranges: Sequence[TokenRange], *, max_running: int, max_step_tokens: int
) -> tuple[ProbeStep, ...]:
    """Smaller before larger: what breaks a process is known before the counts that take long."""
    steps: list[ProbeStep] = []
    for span in ranges:
        for count in counts_of(span):
            if count <= min(max_running, max_step_tokens):
                steps.append(ProbeStep("decode", count))
            if 1 < count <= max_step_tokens:
                steps.append(ProbeStep("prefill", count))
            if 4 <= count <= max_step_tokens and count == span.last and max_running >= 3:
                steps.append(ProbeStep("mixed", count))
    return tuple(steps)
