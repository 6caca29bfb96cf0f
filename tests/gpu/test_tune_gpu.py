"""`moebius kernels tune` on a GPU: small shapes, all that it does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moebius_kernels.triton import dense_tiling, expert_tiling
from moebius_kernels.triton.tiling import Tiling
from moebius_kernels.triton.tune_process import TrialError, TrialProcess
from moebius_kernels.triton.tune_trials import Trials
from moebius_kernels.tuning import DenseProduct, Dropped, ExpertProduct, Tuned, find_tuner, tilings_path
from moebius_worker.preflight.machine import device_here
from tests.kernels.triton.matrices import FORMATS

EXPERTS = ExpertProduct(FORMATS["mxfp4_words"], FORMATS["mxfp4_words"], 16, 4, 448, 192)
DENSE = DenseProduct(FORMATS["nvfp4_words"], 512, 448)


@pytest.fixture
def forgetful():
    """The tables are read anew, before and after."""
    clears = expert_tiling._tables.cache_clear, dense_tiling._tables.cache_clear
    for clear in clears:
        clear()
    yield
    for clear in clears:
        clear()


@pytest.mark.usefixtures("forgetful")
def test_what_is_measured_is_right_kept_and_used(monkeypatch, tmp_path: Path) -> None:
    device = device_here("cuda")
    tuner, events = find_tuner(), []
    points = tuner.points([EXPERTS, DENSE], [1, 64])
    tuner.tune(points, device, tilings_path(tmp_path, device), events.append)
    assert not [event for event in events if isinstance(event, Dropped) and "wrong" in event.reason]
    tuned = [event for event in events if isinstance(event, Tuned)]
    assert len(tuned) == len(points) == 4
    assert all(event.microseconds <= event.usual for event in tuned)
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path))
    user, _ = expert_tiling._tables()
    [entries] = user.values()
    assert [one.tokens for one in entries] == [1, 64]
    for one in entries:
        assert expert_tiling.expert_tiling(one.tokens, one.shape) == one.tiling
    user, _ = dense_tiling._tables()
    assert sum(map(len, user.values())) == 2


def test_a_tiling_that_cannot_be_compiled_costs_only_itself() -> None:
    process = TrialProcess(Trials)
    good = Tiling(8, 32, 64)
    try:
        assert process.ask((DENSE, 8, good, True)).microseconds > 0
        for bad in (replace(good, columns=48), Tiling(128, 256, 512, 4, 5)):
            with pytest.raises(TrialError):
                process.ask((DENSE, 8, bad, True))
        assert process.ask((DENSE, 8, good, True)).microseconds > 0
    finally:
        process.close()
