"""The preflight of a bench: at the token counts that are measured, and at no others."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from moebius_kernels.jit.cache import cache_root
from moebius_kernels.plan import Plan
from moebius_kernels.registry import TokenRange
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.engine.runner import RunnerOptions, place_for
from moebius_worker.preflight.examine import Wanted, examination_for, keep_kernels
from moebius_worker.preflight.machine import device_here
from moebius_worker.preflight.run import preflight
from moebius_worker.preflight.subject import ProbeStep

# By operation, the names of the backends that compute its calls: dense layers of other forms may have others.
Backends = dict[str, list[str]]


def plan_for(checkpoint: Checkpoint, options: RunnerOptions, streams: Sequence[int], prefill: int) -> Plan:
    """As a worker's, for decode steps of `streams` requests and prompts of `prefill` tokens. What is between
    is served as the next larger count is.

    Raises CheckpointError and PreflightError.
    """
    keep_kernels(cache_root(), device_here(place_for(checkpoint, options).device.type))
    # A worker's ranges double; in one that began with few tokens no backend for many would be tried.
    counts = sorted({*streams, prefill // 2, prefill})
    examination = replace(
        examination_for(checkpoint, Wanted(options)),
        ranges=tuple(TokenRange(before + 1, last) for before, last in pairwise([0, *counts])),
        steps=(*(ProbeStep("decode", count) for count in sorted(streams)), ProbeStep("prefill", prefill)),
    )
    return preflight(examination, {})


def backends_of(plan: Plan, tokens: int) -> Backends:
    """Of the calls with so many tokens."""
    found: Backends = {}
    for choice in sorted(plan.choices, key=lambda one: one.operation):
        if choice.tokens.first <= tokens <= choice.tokens.last:
            names = found.setdefault(choice.operation, [])
            if choice.backend not in names:
                names.append(choice.backend)
    return found


def told(backends: Backends) -> str:
    """In a line: those of which there are few, and that which computes all else."""
    names = ["+".join(sorted(some)) for some in backends.values()]
    usual = max(names, key=names.count)
    others = [
        f"{operation} by {name}" for operation, name in zip(backends, names, strict=True) if name != usual
    ]
    return ", ".join([*others, f"all else by {usual}" if others else f"all by {usual}"])


def failures(plan: Plan) -> list[str]:
    """Backends that were tried and are not to be used."""
    return [
        f"{backend} failed at the gate {gate} ({count} times)"
        for (backend, gate), count in plan.rejections.items()
        if gate not in ("admission", "untried")
    ]
