"""The plan for a checkpoint on the device that is here: from the cache, or by a preflight."""

import contextlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch

from moebius_common.cpus import cpu_count
from moebius_kernels.jit import flashinfer_cache
from moebius_kernels.jit.cache import ArtefactCache, cache_root
from moebius_kernels.jit.sources import digest, package_digest
from moebius_kernels.jit.triton_cache import triton_directory, use_directory
from moebius_kernels.plan import Plan, token_ranges
from moebius_kernels.registry import Device, Registry
from moebius_kernels.tuning import tilings_digest
from moebius_worker.checkpoint.checkpoint import Checkpoint
from moebius_worker.engine.models.registry import build_model
from moebius_worker.engine.runner import STEP_TOKENS, RunnerOptions, place_for
from moebius_worker.engine.weights.open import open_weights
from moebius_worker.host_memory import host_memory
from moebius_worker.preflight.gates import MEMORY
from moebius_worker.preflight.machine import device_here
from moebius_worker.preflight.model import subject_options
from moebius_worker.preflight.process import Waiting
from moebius_worker.preflight.run import Examination, Progress, preflight
from moebius_worker.preflight.subject import steps_for

_PLAN = "plan.json"
_WORKER = Path(__file__).parents[1]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the engine will do. `excluded`: "operation:backend" each, which are not to be used."""

    options: RunnerOptions
    excluded: tuple[str, ...] = ()


def find_plan(
    checkpoint: Checkpoint,
    wanted: Wanted,
    registry: Registry,
    progress: Progress = lambda phase, done, total: None,
    *,
    meanwhile: Callable[[], None] = lambda: None,
    waiting: Waiting | None = None,
    fresh: bool = False,
    root: Path | None = None,
) -> Plan:
    """The plan for this checkpoint, these settings, this device and these kernels, kept below `root`.

    `meanwhile` and `waiting`: as of `preflight`; the first may be called more than once. `fresh`: made anew
    even if it is there. Raises CheckpointError and PreflightError.
    """
    root = root or cache_root()
    place = place_for(checkpoint, wanted.options)
    device = device_here(place.device.type)
    keep_kernels(root, device)
    identity = versions_of(device) | _contents(checkpoint, wanted) | {"tilings": tilings_digest(root, device)}
    if not _has_candidates(registry.without(wanted.excluded), device):
        # References alone have nothing to prove.
        return Plan((), identity)
    # A plan for all backends has what is needed to do without some.
    identities = [identity, identity | {"excluded": " ".join(wanted.excluded)}]
    keys = [digest(one) for one in identities]
    kept = ArtefactCache(root / "plans")
    which = 1 if wanted.excluded else 0
    if fresh:
        kept.remove(keys[which])
    for key in () if fresh else keys:
        if (found := _read(kept, key)) is not None:
            log.info("kernel plan found", path=str(kept.root / key))
            return found.without(wanted.excluded)

    def made() -> Plan:
        return preflight(examination_for(checkpoint, wanted), identities[which], progress, meanwhile, waiting)

    def wait() -> None:
        # Weights are read once, however often that is asked for.
        meanwhile()
        progress("waiting for another worker's kernel plan", 0, 0)

    return _kept(made, kept, keys[which], wait)


def keep_kernels(root: Path, device: Device) -> None:
    """What this process and its children compile for it is kept below `root`."""
    if device.kind != "cuda":
        return
    try:
        use_directory(triton_place(root, device))
    except OSError as error:
        # Triton has a place of its own.
        log.warning("compiled kernels cannot be kept", path=str(root), reason=str(error))
    flashinfer_cache.use_directory(
        flashinfer_cache.flashinfer_directory(root, versions_of(device)),
        cpus=cpu_count(),
        memory=host_memory().available,
    )


def _kept(make: Callable[[], Plan], kept: ArtefactCache, key: str, waiting: Callable[[], None]) -> Plan:
    """What `make` makes, or what another worker that is making the same plan now does; `waiting` is called
    again and again meanwhile."""
    made: list[Plan] = []
    # What raises meanwhile is no fault of the cache.
    busy = False

    def build(directory: Path) -> None:
        nonlocal busy
        busy = True
        made.append(make())
        busy = False
        short = {backend for backend, gate in made[0].rejections if gate == MEMORY}
        if short:
            # Next time there may be more.
            raise MemoryError(f"the GPU's memory ran out for {', '.join(sorted(short))}")
        (directory / _PLAN).write_text(made[0].to_json())

    def wait() -> None:
        nonlocal busy
        busy = True
        waiting()
        busy = False

    try:
        kept.get(key, build, wait)
        found = _read(kept, key)
    except (OSError, MemoryError) as error:
        if busy:
            raise
        log.warning("the kernel plan is not kept", path=str(kept.root), reason=str(error))
        found = None
    if found is None:
        found = made[0] if made else make()
    return found


def examination_for(checkpoint: Checkpoint, wanted: Wanted, *, elsewhere: bool = False) -> Examination:
    """What a preflight has to examine, perhaps on a machine `elsewhere`. Raises CheckpointError for a device
    that is not there."""
    options = wanted.options
    place = place_for(checkpoint, options, elsewhere=elsewhere)
    max_step_tokens = options.max_step_tokens or STEP_TOKENS[place.device.type]
    ranges = token_ranges(max(max_step_tokens, options.max_running), options.max_running)
    return Examination(
        subject="moebius_worker.preflight.model:open_subject",
        sizes="moebius_worker.preflight.model:open_sizes" if place.device.type == "cuda" else None,
        options=subject_options(
            checkpoint,
            options,
            place.dtype,
            max_step_tokens,
            None if elsewhere else device_here(place.device.type).architecture,
        ),
        ranges=ranges,
        steps=steps_for(ranges, max_running=options.max_running, max_step_tokens=max_step_tokens),
        # Steps of decodes alone are the ones that become graphs.
        capture_tokens=options.max_running,
        excluded=wanted.excluded,
    )


def _has_candidates(registry: Registry, device: Device) -> bool:
    return any(not backend.is_reference and device.kind in backend.devices for backend in registry.backends)


def triton_place(root: Path, device: Device) -> Path:
    """Where kernels for this device are kept, by what compiles them: they need not be compiled on it."""
    versions = versions_of(device)
    parts = ("architecture", "torch", "triton")
    return triton_directory(root, {name: versions[name] for name in parts if name in versions})


def versions_of(device: Device) -> dict[str, str]:
    """What compiles kernels and runs them."""
    found = {"device": device.name, "driver": device.driver, "torch": torch.__version__}
    if device.architecture is not None:
        found["architecture"] = "{}.{}".format(*device.architecture)
    for package in ("triton", "flashinfer-python", "flashinfer-jit-cache"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _contents(checkpoint: Checkpoint, wanted: Wanted) -> dict[str, str]:
    """Kernels, shapes and settings, by their digests; not what is excluded."""
    config = f"{sorted(checkpoint.config.items(), key=lambda item: item[0])}"
    settings = {
        name: value
        for name, value in examination_for(checkpoint, wanted).options.items()
        if name not in ("model", "device", "architecture", "threads")
    }
    return {
        "kernels": package_digest(),
        # What makes forms of a checkpoint's weights, calls of them, and verdicts of those.
        "worker": package_digest(_WORKER),
        "model": digest({"config": config, "tensors": _tensors(checkpoint, wanted.options)}),
        "settings": digest({"settings": str(sorted(settings.items()))}),
    }


def _tensors(checkpoint: Checkpoint, options: RunnerOptions) -> list[str]:
    """What weights the checkpoint has; none if they are not read from it."""
    if options.dummy_weights is not None:
        return []
    model = build_model(checkpoint.config, place_for(checkpoint, options))
    reader, _ = open_weights(checkpoint, model.LAYOUT)
    return [f"{name} {info.dtype} {list(info.shape)}" for name, info in sorted(reader.tensors.items())]


def _read(kept: ArtefactCache, key: str) -> Plan | None:
    path = kept.root / key / _PLAN
    try:
        return Plan.from_json(path.read_text())
    except OSError:
        return None
    except ValueError as error:
        log.warning("a kernel plan cannot be read and is made anew", path=str(path), reason=str(error))
        kept.remove(key)
        return None
