"""`python -m moebius_worker.preflight.child --fd N`: the sacrificial process. Its task is a line of JSON on
stdin; it makes ready, and tries nothing before stdin ends.

Candidates are foreign code on a device that forgives nothing: they may end this process or hang in it.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from moebius_common.garbage import collect_nothing_yet, spare_what_is_there
from moebius_kernels.jit.triton_cache import hash_compiler
from moebius_kernels.plan import Verdict
from moebius_kernels.registry import Registry, TokenRange, gather
from moebius_worker.preflight.machine import ran_out
from moebius_worker.preflight.probe import Patience, Probe
from moebius_worker.preflight.report import Doing, Judged, Message, RanOut, Site, StepDone, encode
from moebius_worker.preflight.subject import ProbeStep, Subject

Send = Callable[[Message], None]


@dataclass(frozen=True)
class Task:
    """`subject` and `registry`: "module:function", called with `options` and without arguments. `sizes`: as
    `subject`, for one on the device "meta"; None if nothing is compiled for it."""

    subject: str
    sizes: str | None
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
    # Of whoever gives the task: the process may have been started before places for kernels were in it.
    environment: dict[str, str]


def encode_task(task: Task) -> bytes:
    return json.dumps(asdict(task)).encode() + b"\n"


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
    task, send = begin(__doc__, arguments, make_ready)
    try:
        _examine(task, send)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        send(RanOut(str(error)))
        sys.exit(1)


def make_ready() -> None:
    """What every task on a GPU needs: kernels are imported, and Triton reads itself."""
    gather()
    hash_compiler()


def begin(
    description: str | None, arguments: Sequence[str] | None, make_ready: Callable[[], None] = lambda: None
) -> tuple[Task, Send]:
    """What a process of the preflight is to do, and how it reports. `make_ready`: for a process that waits
    until somebody knows."""
    collect_nothing_yet()
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fd", type=int, required=True, help="where to report")
    parser.add_argument("--preload", nargs="*", default=(), help="modules that its task will need")
    options = parser.parse_args(arguments)
    descriptor: int = options.fd
    os.set_inheritable(descriptor, False)
    for module in options.preload:
        import_module(module)
    if options.preload:
        make_ready()
    task = decode_task(sys.stdin.buffer.readline())
    os.environ.update(task.environment)

    def send(message: Message) -> None:
        # Unbuffered: the last words are what counts.
        os.write(descriptor, encode(message))

    return task, send


def _examine(task: Task, send: Send) -> None:
    send(Doing("starting PyTorch and reading weights"))
    subject: Subject = named(task.subject)(**task.options)
    registry: Registry = named(task.registry)()
    if subject.device.kind == "cuda":
        hash_compiler()
    spare_what_is_there()
    sys.stdin.buffer.read()
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


def named(name: str) -> Any:
    """What "module:function" names."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


if __name__ == "__main__":
    main()
