"""`moebius kernels tune` on a GPU: small shapes, all that it does."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from moebius_kernels.jit.triton_cache import watch_compilations
from moebius_kernels.triton import dense_tiling, expert_tiling, hopper_experts
from moebius_kernels.triton.tiling import Tiling
from moebius_kernels.triton.tune_ahead import Trial, compile_ahead
from moebius_kernels.triton.tune_process import TrialError, TrialProcess
from moebius_kernels.triton.tune_search import to_compile
from moebius_kernels.triton.tune_trials import WRONG, Trials
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


class Watched(Trials):
    """Answers with the names of the kernels that had to be compiled, and the error."""

    def __call__(self, request: Trial) -> tuple[list[str], float]:
        names: list[str] = []
        watch_compilations(names.append)
        error = super().__call__(request).error
        return names, error


def test_what_has_been_compiled_ahead_is_measured_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = device_here("cuda")
    points = find_tuner().points([EXPERTS, DENSE], [1, 8, 64])
    trials: list[Trial] = [(one.product, one.tokens, way) for one in points for way in to_compile(one)]
    if device.architecture == (9, 0):
        trials.append((EXPERTS, 1024, hopper_experts.routed_experts))
    compile_ahead(trials, device.architecture, lambda event: None)
    found: list[tuple[Trial, list[str], float]] = []
    with closing(TrialProcess(Watched)) as process:
        for trial in trials:
            # Some take more shared memory than there is.
            with contextlib.suppress(TrialError):
                found.append((trial, *process.ask(trial)))
    assert len(found) > len(trials) / 2
    assert [(tokens, way, names) for (_, tokens, way), names, _ in found if names] == []
    assert max(error for *_, error in found) < WRONG


def test_a_tiling_that_cannot_be_compiled_or_launched_costs_only_itself() -> None:
    process = TrialProcess(Trials)
    good = Tiling(8, 32, 64)
    # Steps enough for five stages; four of x alone take 256 KiB of shared memory.
    long = replace(DENSE, columns=4096)
    try:
        assert process.ask((long, 8, good)).microseconds > 0
        for bad, why in (
            (replace(good, columns=48), "power of 2"),
            (Tiling(128, 64, 256, 4, 5), "shared memory"),
        ):
            with pytest.raises(TrialError, match=why):
                process.ask((long, 8, bad))
        assert process.ask((long, 8, good)).microseconds > 0
    finally:
        process.close()
