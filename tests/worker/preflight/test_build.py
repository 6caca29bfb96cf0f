"""Kernels of a model compiled ahead, without a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moebius_kernels.jit.triton_cache import use_directory
from moebius_kernels.plan import token_ranges
from moebius_kernels.registry import Architecture, Device, Registry, gather
from moebius_kernels.triton.tiling_tables import user_entries
from moebius_worker.checkpoint.checkpoint import Checkpoint, open_checkpoint
from moebius_worker.engine.runner import RunnerOptions
from moebius_worker.preflight import build
from moebius_worker.preflight.ahead import every_candidate
from moebius_worker.preflight.build import build_kernels
from moebius_worker.preflight.examine import Wanted, examination_for, triton_place
from moebius_worker.preflight.model import ModelSubject, open_sizes
from moebius_worker.preflight.report import Compiled
from moebius_worker.preflight.run import Examination, PreflightError, compile_ahead
from moebius_worker.preflight.subject import ProbeStep
from tests.tiny import write_checkpoint

OPTIONS = RunnerOptions(device="cuda", dummy_weights="bf16", max_running=2, max_step_tokens=4)


SIZES = """
import sys, torch
from moebius_worker.preflight.ahead import leave_dynamo_out
{before}
rows = torch.empty(3, 4, device="meta")
total = torch.where(rows > 0, rows * 2, 1.0).clamp(min=0).sum(dim=-1)
print(tuple(total.shape), total.dtype, "torch._dynamo.symbolic_convert" in sys.modules)
"""


def norms() -> Registry:
    """Few candidates: compilers take their time."""
    found = gather()
    kept = (one for one in found.backends if one.is_reference or one.operation == "rms_norm")
    return Registry(tuple(kept), {})


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch) -> Checkpoint:
    """With a cache of its own, and Triton's compiler."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path / "cache"))
    return open_checkpoint(str(write_checkpoint(tmp_path / "model")))


def examined(checkpoint: Checkpoint, **changes: Any) -> Examination:
    """On an H200, norms alone but for what changes."""
    examination = examination_for(checkpoint, Wanted(OPTIONS), elsewhere=True)
    options = examination.options | {"architecture": (9, 0)}
    return replace(examination, **{"registry": f"{__name__}:norms", "options": options, **changes})


def raises(**options: Any) -> ModelSubject:
    """A model whose steps raise once they have launched their norms."""
    subject = open_sizes(**options)
    run = subject.run

    def raising(step: ProbeStep) -> None:
        run(step)
        raise ValueError(f"a step\nof {step.tokens}")

    subject.run = raising
    return subject


def test_what_a_model_launches_is_in_the_cache(checkpoint: Checkpoint, tmp_path: Path) -> None:
    use_directory(tmp_path / "triton")
    phases: list[str] = []
    compiled = compile_ahead(examined(checkpoint), lambda phase, done, total: phases.append(phase))
    kernels = [path.stem for path in (tmp_path / "triton").rglob("*.cubin")]
    assert set(kernels) == {"_norm"}
    assert compiled == Compiled(len(kernels))
    launchers = list((tmp_path / "triton").rglob("__triton_launcher*.so"))
    assert launchers
    for path in launchers:
        # With a driver here or without, it is the library of the machine where they are loaded.
        read = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True)
        assert "Shared library: [libcuda.so.1]" in read.stdout
    assert phases[0] == "preflight: looking for kernels to compile"
    assert phases[-1] == f"preflight: compiling kernels, {len(kernels)} of {len(kernels)}"


def test_what_no_kernel_computes_hides_no_other_kernel(checkpoint: Checkpoint) -> None:
    """References of attention and experts look at numbers, which there are none of: the step ended there."""
    sizes = open_sizes(**examined(checkpoint).options)
    sizes.bind(every_candidate(norms(), token_ranges(4, 2), sizes.device))
    for step in examined(checkpoint).steps:
        sizes.run(step)


def test_where_the_launchers_cannot_be_compiled_the_build_fails(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("CC", "/no/compiler")
    monkeypatch.setattr(build, "examination_for", lambda *_, **__: examined(checkpoint))
    with pytest.raises(
        PreflightError, match=r"For 9\.0: 0 of (\d+) kernels compiled, \1 failed: .*/no/compiler"
    ):
        build_kernels(checkpoint, OPTIONS, (9, 0), lambda *_: None)
    assert list((tmp_path / "cache").rglob("*.cubin"))


def test_steps_that_raise_are_told(checkpoint: Checkpoint, monkeypatch) -> None:
    examination = examined(checkpoint, sizes=f"{__name__}:raises")
    monkeypatch.setattr(build, "examination_for", lambda *_, **__: examination)
    said = (
        "steps not followed to their ends: a decode step of 1 tokens raised ValueError: a step of 1\\. What"
    )
    with pytest.raises(PreflightError, match=f"{len(examination.steps)} {said}"):
        build_kernels(checkpoint, OPTIONS, (9, 0), lambda *_: None)


def test_a_model_without_kernels_is_no_success(checkpoint: Checkpoint, monkeypatch) -> None:
    empty = examined(checkpoint, steps=())
    monkeypatch.setattr(build, "examination_for", lambda *_, **__: empty)
    with pytest.raises(PreflightError, match=r"For 9\.0 this model launches no kernel"):
        build_kernels(checkpoint, OPTIONS, (9, 0), lambda *_: None)


@pytest.mark.parametrize("architecture", [(7, 5), (99, 0)])
def test_an_architecture_that_no_kernel_is_for_is_refused(
    checkpoint: Checkpoint, architecture: Architecture
) -> None:
    said = r"No kernel is made for {}\.{}\. Choose among 8\.0, .*9\.0, .*12\.1\.".format(*architecture)
    with pytest.raises(PreflightError, match=said):
        build_kernels(checkpoint, OPTIONS, architecture, lambda *_: None)


def test_the_driver_and_the_name_of_a_gpu_do_not_matter_to_where_kernels_are(tmp_path: Path) -> None:
    here = Device("cuda", "NVIDIA H200", (9, 0), "580.1")
    assert triton_place(tmp_path, here) == triton_place(tmp_path, Device("cuda", "any", (9, 0)))
    assert triton_place(tmp_path, here) != triton_place(tmp_path, Device("cuda", "any", (12, 0)))


def test_a_model_that_has_no_sizes_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "model")))
    with pytest.raises(PreflightError, match="The process that compiles exited with status 1"):
        build_kernels(checkpoint, replace(OPTIONS, dummy_weights="nothing"), (9, 0), lambda *_: None)


def test_without_a_place_to_keep_kernels_nothing_is_compiled(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path / "a file"))
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "model")))
    with pytest.raises(PreflightError, match=r"a file.*Set MOEBIUS_CACHE_DIR"):
        build_kernels(checkpoint, OPTIONS, (9, 0), lambda *_: None)


@pytest.mark.parametrize(("before", "imported"), [("", True), ("leave_dynamo_out()", False)])
def test_sizes_are_computed_without_what_compiles_python(before: str, imported: bool) -> None:
    """Without the first case nobody would notice that PyTorch needs it no more."""
    command = [sys.executable, "-c", SIZES.format(before=before)]
    paths = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=paths, check=True, timeout=100, capture_output=True, text=True)
    assert done.stdout == f"(3,) torch.float32 {imported}\n"


def test_a_gpu_whose_architecture_is_known_is_not_asked(tmp_path: Path, monkeypatch) -> None:
    """That would take as long as all that is looked for: nothing else in this process uses it."""
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path / "cache"))
    asked: list[str] = []
    for name in ("is_available", "current_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: (asked.append(name), False)[1])
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "model")))
    options = examination_for(checkpoint, Wanted(OPTIONS), elsewhere=True).options
    subject = open_sizes(**options | {"architecture": (9, 0)})
    assert subject.device.architecture == (9, 0)
    assert user_entries("dense", lambda record: record) == []
    assert not asked
