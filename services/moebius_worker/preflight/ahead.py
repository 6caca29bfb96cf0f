"""`python -m moebius_worker.preflight.ahead --fd N`: compiles what the sacrificial process is going to try,
on all CPUs. Its task is that of `child.py`.

The model has sizes and no numbers, and no GPU is used, but perhaps asked what it is. Whatever goes wrong here
is counted, and only means that a kernel is compiled later: by the sacrificial process, which judges.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from types import ModuleType
from typing import Any

import torch

from moebius_common.cpus import cpu_count
from moebius_kernels.calls import named_arguments, shapes_of
from moebius_kernels.jit.triton_ahead import collected, compile_all, pretend
from moebius_kernels.jit.triton_cache import hash_compiler
from moebius_kernels.operations import OPERATION_NAMES, REFERENCE, Operations
from moebius_kernels.registry import Backend, Device, Query, Registry, TokenRange, gather, refusal
from moebius_worker.host_memory import host_memory
from moebius_worker.preflight.child import Send, Task, begin, named
from moebius_worker.preflight.report import Compiled, Doing
from moebius_worker.preflight.subject import Subject

# What one process that compiles may take of the host's memory.
_PROCESS_BYTES = 2**30
# Of a reason, in characters.
_REASON_LENGTH = 300
# What is like the results of references that look at numbers, which nobody has here.
_RESULTS: dict[str, Callable[[Mapping[str, Any]], torch.Tensor]] = {
    "routed_experts": lambda given: torch.empty_like(given["x"]),
    "paged_attention": lambda given: given["q"].new_empty(*given["q"].shape[:2], given["kv_pages"].value_dim),
}


def main(arguments: Sequence[str] | None = None) -> None:
    leave_dynamo_out()
    hashing = Thread(target=hash_compiler)
    hashing.start()
    task, send = begin(__doc__, arguments, make_ready)
    # It must not be in the midst of something when processes are forked.
    hashing.join()
    compile_ahead(task, send)


def make_ready() -> None:
    """What every task needs is imported: kernels, and what PyTorch takes to compute sizes in Python."""
    gather()
    torch.arange(1, device="meta")


def leave_dynamo_out() -> None:
    """On "meta" PyTorch computes sizes in Python, and each of these functions imports all of torch.compile,
    for seconds, to say that it is not to be compiled. In this process nothing is."""
    nothing: Any = ModuleType("torch._dynamo")
    nothing.disable = lambda function, *_, **__: function
    sys.modules[nothing.__name__] = torch._dynamo = nothing


def compile_ahead(task: Task, send: Send) -> None:
    """Everything that the steps of `task.sizes` launch, into Triton's cache."""
    assert task.sizes is not None
    send(Doing("looking for kernels to compile"))
    subject: Subject = named(task.sizes)(**task.options)
    assert subject.device.architecture is not None
    pretend(subject.device.architecture)
    subject.bind(every_candidate(named(task.registry)().without(task.excluded), task.ranges, subject.device))
    unfinished: list[str] = []
    with collected() as compilations:
        for step in task.steps:
            try:
                subject.run(step)
            except Exception as error:
                unfinished.append(f"a {step.kind} step of {step.tokens} tokens raised {_said(error)}")
    processes = max(1, min(cpu_count(), host_memory().available // _PROCESS_BYTES))
    count = len(compilations)

    def done(finished: int) -> None:
        send(Doing(f"compiling kernels, {finished} of {count}"))

    failures = compile_all(compilations, processes, int(task.patience.compile), done)
    reason = next(iter(failures + unfinished), "")
    send(Compiled(count, len(failures), len(unfinished), reason))


def _said(error: Exception) -> str:
    """In one line that is not too long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_LENGTH]


def every_candidate(registry: Registry, ranges: Sequence[TokenRange], device: Device) -> Operations:
    """Operations that call every Triton backend that may be tried. Others have their own ways to compile."""

    def calling(operation: str) -> Callable[..., Any]:
        backends = [one for one in registry.of(operation) if one.is_triton]
        functions: list[tuple[Backend, Callable[..., Any]]] = [(one, one.bind()) for one in backends]

        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = named_arguments(operation, args, kwargs)
            tokens = next(iter(arguments.values())).shape[0]
            span = next(one for one in ranges if one.first <= tokens <= one.last)
            query = Query(operation, shapes_of(operation, arguments), span, device)
            results: list[Any] = []
            for backend, function in functions:
                if refusal(backend, query) is None:
                    with contextlib.suppress(Exception):
                        results.append(function(*args, **kwargs))
            if results:
                return results[0]
            if operation in _RESULTS:
                return _RESULTS[operation](arguments)
            return getattr(REFERENCE, operation)(*args, **kwargs)

        return call

    return Operations(**{name: calling(name) for name in OPERATION_NAMES})


if __name__ == "__main__":
    main()
