"""What is said of an engine that cannot serve."""

import tempfile
from pathlib import Path

import pytest
import torch

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine import serving
from moebius_worker.engine.memory import OutOfMemoryPlan
from moebius_worker.engine.phases import Phases
from moebius_worker.preflight.run import PreflightMemoryError
from moebius_worker.settings import WorkerSettings
from tests.tiny import write_checkpoint


@pytest.mark.parametrize(
    "error", [PreflightMemoryError("CUDA out of memory."), torch.OutOfMemoryError("CUDA out of memory.")]
)
def test_memory_that_runs_out_before_there_is_a_plan_is_a_refusal_with_numbers(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: object) -> None:
        raise error

    monkeypatch.setattr(serving, "prepare", prepare)
    model = str(write_checkpoint(tmp_path))
    settings = WorkerSettings(model=model, device="cpu", kv_cache_memory="1MiB", max_step_tokens=24)
    said = r"ran out.* steps of up to 24 tokens .*--max-step-tokens.* The device said: CUDA out of memory\.$"
    with tempfile.TemporaryFile() as flights, pytest.raises(OutOfMemoryPlan, match=said):
        serving.load_and_serve(
            open_checkpoint(model), settings, None, flights.fileno(), lambda *_: None, Phases(), {}
        )
