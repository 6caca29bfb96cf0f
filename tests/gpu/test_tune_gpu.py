"""`moebius kernels tune` on a GPU: small shapes, all that it does."""

from collections.abc import Callable, Iterator
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
def forgetful() -> Iterator[Callable[[], None]]:
    """The tables are read anew before and after, and whenever this is called."""

    def forget() -> None:
        expert_tiling._tables.cache_clear()
        dense_tiling._tables.cache_clear()

    forget()
    yield forget
    forget()


def test_what_is_measured_is_right_kept_and_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forgetful: Callable[[], None]
) -> None:
    device = device_here("cuda")
    tuner, events = find_tuner(), []
    points = tuner.points([EXPERTS, DENSE], [1, 64])
    tuner.tune(points, device, tilings_path(tmp_path, device), events.append)
    assert not [event for event in events if isinstance(event, Dropped) and "wrong" in event.reason]
    tuned = [event for event in events if isinstance(event, Tuned)]
    assert len(tuned) == len(points) == 4
    assert all(event.microseconds <= event.usual for event in tuned)
    # The search has read them too, to know what was usual.
    forgetful()
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path))
    user, _ = expert_tiling._tables()
    [entries] = user.values()
    assert [one.tokens for one in entries] == [1, 64]
    for one in entries:
        assert expert_tiling.expert_tiling(one.tokens, one.shape) == one.tiling
    user, _ = dense_tiling._tables()
    assert sum(map(len, user.values())) == 2


def test_a_tiling_that_cannot_be_compiled_or_launched_costs_only_itself() -> None:
    process = TrialProcess(Trials)
    good = Tiling(8, 32, 64)
    # Steps enough for five stages; four of x alone take 256 KiB of shared memory.
    long = replace(DENSE, columns=4096)
    try:
        assert process.ask((long, 8, good, True)).microseconds > 0
        for bad, why in (
            (replace(good, columns=48), "power of 2"),
            (Tiling(128, 64, 256, 4, 5), "shared memory"),
        ):
            with pytest.raises(TrialError, match=why):
                process.ask((long, 8, bad, True))
        assert process.ask((long, 8, good, True)).microseconds > 0
    finally:
        process.close()
