"""`python -m moebius_worker.preflight.child --fd N`: the sacrificial process. Its task is JSON on stdin.

Candidates are foreign code on a device that forgives nothing: they may end this process or hang in it.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from moebius_kernels.plan import Verdict
from moebius_kernels.registry import Registry, TokenRange
from moebius_worker.preflight.probe import Patience, Probe
from moebius_worker.preflight.report import Doing, Judged, Message, Site, StepDone, encode
from moebius_worker.preflight.subject import ProbeStep, Subject


@dataclass(frozen=True)
class Task:
    """`subject` and `registry`: "module:function", called with `options` and without arguments."""

    subject: str
    options: dict[str, Any]
    registry: str
    excluded: tuple[str, ...]
    ranges: tuple[TokenRange, ...]
    steps: tuple[ProbeStep, ...]
    # The first step that has not been judged.
    first_step: int
    capture_tokens: int
    patience: Patience
    known: tuple[Judged, ...]


def encode_task(task: Task) -> bytes:
    return json.dumps(asdict(task)).encode()


def decode_task(data: bytes) -> Task:
    """The inverse of `encode_task`."""
    found = json.loads(data)
    return Task(
        **{
            **found,
            "excluded": tuple(found["excluded"]),
            "ranges": tuple(TokenRange(**one) for one in found["ranges"]),
            "steps": tuple(ProbeStep(**one) for one in found["steps"]),
            "patience": Patience(**found["patience"]),
            "known": tuple(Judged(Site(**one["site"]), Verdict(**one["verdict"])) for one in found["known"]),
        }
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="moebius_worker.preflight.child", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="where to report")
    descriptor = parser.parse_args(arguments).fd
    os.set_inheritable(descriptor, False)
    task = decode_task(sys.stdin.buffer.read())

    def send(message: Message) -> None:
        # Unbuffered: the last words are what counts.
        os.write(descriptor, encode(message))

    _examine(task, send)
    os.close(descriptor)


def _examine(task: Task, send: Any) -> None:
    send(Doing("starting PyTorch and reading weights"))
    subject: Subject = _named(task.subject)(**task.options)
    registry: Registry = _named(task.registry)()
    known: dict[tuple[Any, str], Verdict] = {
        (judged.site, judged.verdict.backend): judged.verdict for judged in task.known
    }
    probe = Probe(
        registry.without(task.excluded),
        task.ranges,
        subject.device,
        subject.machine,
        send,
        capture_tokens=task.capture_tokens,
        patience=task.patience,
        known=known,
    )
    subject.bind(probe.operations())
    for index, step in enumerate(task.steps[task.first_step :], start=task.first_step):
        send(Doing(f"{step.kind} of {step.tokens} tokens"))
        probe.kind = step.kind
        subject.run(step)
        subject.machine.synchronise()
        send(StepDone(index + 1, len(task.steps)))


def _named(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


if __name__ == "__main__":
    main()
