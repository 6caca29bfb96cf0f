"""What a model launches on a GPU of architecture 9.0, without one, as JSON: kernels of the steps that a
preflight takes, and those that it did not meet but other steps do.

A program of its own: where Triton's interpreter is on, nothing can be compiled. `python -m
tests.worker.preflight.launched MODEL FORM`: the directory of a config, and a form of dummy weights.
"""

import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any

from moebius_kernels.jit.triton_ahead import Compilation, collected, pretend
from moebius_kernels.plan import token_ranges
from moebius_kernels.registry import gather
from moebius_worker.preflight.ahead import every_candidate
from moebius_worker.preflight.model import ModelSubject, open_sizes
from moebius_worker.preflight.subject import ProbeStep, steps_for

RUNNING, STEP = 96, 2048
ARCHITECTURE = (9, 0)
# Small numbers, neighbours of powers of two, multiples of 16 and of nothing: kernels are compiled for such.
DECODES = (*range(1, 10), 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 80, 95, 96)
PROMPTS = (*range(2, 10), 15, 16, 17, 31, 32, 33, 48, 64, 65, 129, 256, 257, 500, 768, 1023, 1024, 1999)


def main(model: str, form: str) -> None:
    pretend(ARCHITECTURE)
    examined = steps_for(token_ranges(STEP, RUNNING), max_running=RUNNING, max_step_tokens=STEP)
    others = [ProbeStep("decode", count) for count in DECODES]
    others += [ProbeStep("prefill", count) for count in PROMPTS]
    others += [ProbeStep("mixed", count) for count in (5, 48, 100, 777)]
    with collected() as compilations:
        subject = _subject(model, form, STEP)
        for step in examined:
            subject.run(step)
        met = len(compilations)
        # Caches of another size, as the engine's are.
        engine = _subject(model, form, STEP - 48)
        late = [name for step in others for name in _new(engine, step, compilations)]
    json.dump({"met": [_name(one) for one in compilations[:met]], "late": late}, sys.stdout)


def _subject(model: str, form: str, max_step_tokens: int) -> ModelSubject:
    subject = open_sizes(
        model,
        ARCHITECTURE,
        device="cuda",
        dtype="bfloat16",
        page_size=16,
        kv_format="model",
        threads=1,
        expand_weights=False,
        dummy_weights=form,
        max_running=RUNNING,
        max_step_tokens=max_step_tokens,
    )
    subject.bind(every_candidate(gather(), token_ranges(STEP, RUNNING), subject.device))
    return subject


def _new(subject: ModelSubject, step: ProbeStep, compilations: Sequence[Compilation]) -> list[str]:
    before = len(compilations)
    subject.run(step)
    return [f"{_name(one)} in a {step.kind} of {step.tokens}" for one in compilations[before:]]


def _name(compilation: Any) -> str:
    found: str = inspect.getclosurevars(compilation).nonlocals["src"].name
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
