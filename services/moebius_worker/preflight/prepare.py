"""What an engine gets of the preflight: operations that follow the plan, and a word about them."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import structlog

from moebius_kernels.dispatch import Watch, bind
from moebius_kernels.jit.triton_cache import watch_compilations
from moebius_kernels.operations import REFERENCE, Operations
from moebius_kernels.plan import Plan, rows_of
from moebius_kernels.registry import gather
from moebius_proto.worker.v1 import worker_pb2
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.engine.runner import ModelRunner
from moebius_worker.flight_recorder import FlightRecorder
from moebius_worker.preflight.examine import Wanted, examination_for, find_plan
from moebius_worker.preflight.process import Waiting
from moebius_worker.preflight.run import Progress
from moebius_worker.preflight.subject import ProbeStep
from moebius_worker.preflight.workload import Workload

log = structlog.get_logger(__name__)


@dataclass
class Prepared:
    """`operations`: what the model is to be bound to."""

    plan: Plan
    operations: Operations
    excluded: tuple[str, ...]
    # What the engine will compute, one of each kind.
    steps: tuple[ProbeStep, ...]
    # Kernels compiled since `freeze`.
    late_compilations: int = field(default=0, init=False)

    def warm_up(self, runner: ModelRunner, progress: Progress) -> None:
        """Computes each kind of step once, before anybody waits for it: kernels are loaded, and those that
        depend on the sizes of this engine's caches compiled. What the caches held is lost."""
        workload = Workload(runner.layout, runner.vocab_size, runner.max_model_len)
        with runner.one_layer_of_each_kind():
            for done, step in enumerate(self.steps):
                progress("warming up", done, len(self.steps))
                if slices := workload.slices(step):
                    logits, find_faulty = runner.step(slices)
                    workload.draw(logits, self.operations.draw_tokens)
                    # A GPU's fault shows now or in somebody's request.
                    find_faulty()

    def freeze(self) -> None:
        """From now on no kernel should have to be compiled; if one is, it is counted and logged."""
        watch_compilations(self._compiled_late)

    def _compiled_late(self, name: str) -> None:
        self.late_compilations += 1
        log.warning("a kernel was compiled in somebody's request", kernel=name)

    def message(self) -> worker_pb2.KernelPlan:
        return describe(self.plan, self.excluded)


def prepare(
    checkpoint: Checkpoint,
    wanted: Wanted,
    flights: int,
    progress: Progress,
    meanwhile: Callable[[], None] = lambda: None,
    waiting: Waiting | None = None,
    watch: Watch | None = None,
) -> Prepared:
    """Finds the plan and binds it. `flights`: the open file of the flight recorder. `meanwhile` and
    `waiting`: as of `preflight`; `watch`: as of `bind`.

    Raises CheckpointError and PreflightError.
    """
    progress("looking for a kernel plan", 0, 0)
    registry = gather()
    for module, reason in registry.missing.items():
        log.info("backends are not here", module=module, reason=reason)
    mistaken = registry.mistaken(wanted.excluded)
    for name, reason in mistaken.items():
        # A start all the same: its library may be missing on this node alone.
        log.warning("a name excludes no backend", backend=name, reason=reason)
    wanted = replace(wanted, excluded=tuple(one for one in wanted.excluded if one not in mistaken))
    plan = find_plan(checkpoint, wanted, registry, progress, meanwhile=meanwhile, waiting=waiting)
    if not plan.choices:
        return Prepared(plan, REFERENCE, wanted.excluded, ())
    log.info("kernel plan\n" + "\n".join("  ".join(row) for row in rows_of(plan)))
    operations = bind(plan, registry, FlightRecorder(flights), _unplanned, watch)
    return Prepared(plan, operations, wanted.excluded, examination_for(checkpoint, wanted).steps)


def references_alone(excluded: tuple[str, ...]) -> Prepared:
    """Nothing has to be proved then, and no kernel of ours can be at fault."""
    return Prepared(Plan(), REFERENCE, excluded, ())


def describe(plan: Plan, excluded: tuple[str, ...]) -> worker_pb2.KernelPlan:
    """For status and metrics."""
    first_reasons: dict[tuple[str, str], str] = {}
    for choice in plan.choices:
        for verdict in choice.rejections:
            key = f"{choice.operation}:{verdict.backend}", verdict.rejected or ""
            first_reasons.setdefault(key, verdict.reason or "")
    return worker_pb2.KernelPlan(
        backends=plan.backends,
        rejections=[
            worker_pb2.KernelRejection(
                backend=backend, gate=gate, count=count, reason=first_reasons[backend, gate]
            )
            for (backend, gate), count in plan.rejections.items()
        ],
        excluded=excluded,
    )


def _unplanned(operation: str, key: str) -> None:
    log.warning("the preflight met no such call; the reference computes it", operation=operation, of=key)
