"""Kernels of trials, compiled before any is timed: those that are launched then, and each once."""

import multiprocessing
from collections import Counter

import pytest

pytest.importorskip("triton")
from moebius_kernels.triton.tiling import ExpertTiling, Tiling
from moebius_kernels.triton.tune_ahead import compile_ahead
from moebius_kernels.tuning import Compiling, DenseProduct, ExpertProduct
from tests.kernels.triton.matrices import FORMATS
from tests.without_interpreter import told

DENSE = DenseProduct(FORMATS["bf16"], 64, 128)
EXPERTS = ExpertProduct(FORMATS["bf16"], FORMATS["bf16"], 4, 2, 128, 64)
GOOD = Tiling(8, 32, 64, splits=2)
# Sizes are powers of two.
BAD = Tiling(8, 32, 48)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_trials_launch_what_has_been_compiled_ahead(tmp_path):
    """Of all sorts of arguments, by the keys that Triton finds kernels by."""
    found = told("tests.kernels.triton.tune_keys", cache=tmp_path)
    ahead, measured = (set(found[name]) for name in ("ahead", "measured"))
    assert len(measured) > 250
    assert measured - ahead == set()
    assert ahead - measured == set()
    assert not list(tmp_path.rglob("*.cubin"))


def test_equal_kernels_are_compiled_once_and_one_that_cannot_be_costs_no_other(cache):
    """The norm before dense products, and sums of shares, serve all their tilings."""
    events: list[Compiling] = []
    dense = [(DENSE, 8, tiling) for tiling in (GOOD, Tiling(16, 32, 64, splits=2), BAD, GOOD)]
    experts = [(EXPERTS, 2, ExpertTiling(Tiling(8, 32, 64), Tiling(8, columns, 64))) for columns in (32, 64)]
    compile_ahead([*dense, *experts], (9, 0), events.append)
    kernels = Counter(path.stem for path in cache.rglob("*.cubin"))
    # Of experts: gate and up, which both have, and down twice.
    assert kernels == {"_norm": 1, "_sum_shares": 1, "grouped_gemm": 2 + 3, "_sum_experts": 1}
    total = kernels.total() + 1
    assert [event.total for event in events] == [total] * len(events)
    assert [event.done for event in events] == sorted(event.done for event in events)
    assert (events[0].done, events[-1].done) == (0, total)


def test_whoever_has_enough_ends_it_all(cache):
    def enough(event: Compiling) -> None:
        raise KeyboardInterrupt

    before = multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt):
        compile_ahead([(DENSE, 8, GOOD)], (9, 0), enough)
    assert set(multiprocessing.active_children()) <= set(before)


def test_nothing_takes_no_process(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: pytest.fail("nothing was to be done"))
    compile_ahead([], (9, 0), lambda event: None)
