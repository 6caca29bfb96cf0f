"""How tilings are searched for: with a clock that is made up, in processes that die, in the interpreter."""

import os
from dataclasses import replace

import pytest
import torch

from moebius_kernels.formats.ggml import Ggml
from moebius_kernels.launch import Geometry, LaunchError
from moebius_kernels.registry import Device
from moebius_kernels.tuning import (
    DenseProduct,
    Dropped,
    ExpertProduct,
    Point,
    Trying,
    Tuned,
    find_tuner,
    tilings_path,
)
from tests.kernels.paged_world import DEVICE
from tests.kernels.triton.answers import Clock, Hardy, Weak, cost
from tests.kernels.triton.matrices import FORMATS

triton = pytest.importorskip("triton")
from gguf import GGMLQuantizationType as Type  # noqa: E402

from moebius_kernels.triton import tune, tune_process, tune_trials  # noqa: E402
from moebius_kernels.triton.dense_tiling import DenseShape  # noqa: E402
from moebius_kernels.triton.dense_tiling import rules as dense_rules  # noqa: E402
from moebius_kernels.triton.expert_tiling import (  # noqa: E402
    ExpertShape,
    measurement_of,
    rules,
)
from moebius_kernels.triton.tiling import ExpertTiling, Tiling  # noqa: E402
from moebius_kernels.triton.tiling_tables import read_user_table  # noqa: E402
from moebius_kernels.triton.tune_candidates import dense_candidates, expert_candidates  # noqa: E402
from moebius_kernels.triton.tune_points import points_of, shape_of  # noqa: E402
from moebius_kernels.triton.tune_process import TrialError, TrialProcess  # noqa: E402
from moebius_kernels.triton.tune_search import search, to_compile  # noqa: E402
from moebius_kernels.triton.tune_trials import DenseTrials, ExpertTrials, Figures, Trials  # noqa: E402

EXPERTS = ExpertProduct(FORMATS["nvfp4_words"], FORMATS["nvfp4_words"], 24, 4, 320, 192)
DENSE = DenseProduct(FORMATS["int4"], 96, 320)
# Small enough for the interpreter.
SMALL = ExpertProduct(FORMATS["nvfp4_words"], FORMATS["nvfp4_words"], 4, 2, 64, 32)
SMALL_TILING = ExpertTiling(Tiling(8, 32, 64), Tiling(8, 64, 32))
GPU = Device("cuda", "NVIDIA H200", (9, 0))


def point_of(product, tokens) -> Point:
    [point] = points_of([product], [tokens])
    return point


class Bench:
    """Answers as `Trials` would, by a clock of its own: `time_of` a tiling, or an error that it raises."""

    def __init__(self, time_of) -> None:
        self.time_of = time_of
        self.asked = []
        self.events = []

    def ask(self, request) -> Figures:
        _, _, tiling = request
        self.asked.append(tiling)
        found = self.time_of(tiling)
        return found if isinstance(found, Figures) else Figures(1e-3, found)

    def search(self, point):
        return search(point, self.ask, self.events.append)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@pytest.mark.parametrize("tokens", [1, 8, 64, 512, 8192])
def test_the_fastest_pair_of_candidates_is_chosen(tokens):
    bench = Bench(cost)
    entry = bench.search(point_of(EXPERTS, tokens))
    shape = shape_of(EXPERTS)
    groups = expert_candidates(shape, tokens)
    pairs = [ExpertTiling(one, two) for gates, downs in groups for one in gates for two in downs]
    assert cost(entry.tiling) == min(map(cost, [*pairs, rules(tokens, shape)]))
    assert entry.microseconds == cost(entry.tiling)
    assert (entry.shape, entry.tokens) == (shape, tokens)
    assert len(bench.asked) == len(set(bench.asked)) <= bench.of(Trying)[0].point.candidates
    [told] = bench.of(Tuned)
    assert (told.microseconds, told.usual) == (entry.microseconds, cost(rules(tokens, shape)))


@pytest.mark.parametrize("tokens", [1, 8, 32, 100])
def test_the_fastest_dense_candidate_is_chosen(tokens):
    bench = Bench(lambda tiling: cost(tiling) - tiling.prefetch)
    entry = bench.search(point_of(DENSE, tokens))
    every = [*dense_candidates(shape_of(DENSE), tokens), dense_rules(tokens, shape_of(DENSE))]
    assert entry.tiling.prefetch
    assert cost(entry.tiling) == min(map(cost, every))
    assert len(bench.asked) <= bench.of(Trying)[0].point.candidates


def test_the_best_so_far_is_shown():
    bench = Bench(cost)
    bench.search(point_of(DENSE, 8))
    tries = bench.of(Trying)
    assert [one.number for one in tries] == list(range(1, len(tries) + 1))
    assert tries[0].best is None
    for index, one in enumerate(tries[1:], start=1):
        assert one.best == min(cost(tiling) for tiling in bench.asked[:index])


def test_what_raises_and_what_is_wrong_is_dropped_said_and_costs_only_itself():
    point = point_of(EXPERTS, 8)
    right = Bench(cost).search(point)

    def time_of(tiling):
        if tiling == right.tiling:
            return Figures(0.3, None)
        if tiling.gate_up.registers:
            raise TrialError("out of resource: shared memory")
        return cost(tiling)

    bench = Bench(time_of)
    entry = bench.search(point)
    assert entry is not None
    assert entry.tiling != right.tiling
    reasons = [one.reason for one in bench.of(Dropped)]
    assert "wrong numbers, error 3.0e-01" in reasons
    assert "out of resource: shared memory" in reasons
    good = [tiling for tiling in bench.asked if tiling != right.tiling and not tiling.gate_up.registers]
    assert entry.microseconds == min(map(cost, good))
    assert len(good) + len(reasons) == len(bench.asked)


def test_gate_and_up_find_another_down_if_the_first_works_with_none():
    point = point_of(EXPERTS, 8)
    [(_, downs), *_] = expert_candidates(shape_of(EXPERTS), 8)

    def time_of(tiling):
        if tiling.down == downs[0]:
            raise TrialError("cannot be compiled")
        return cost(tiling)

    entry = Bench(time_of).search(point)
    assert entry.microseconds < cost(rules(8, shape_of(EXPERTS)))


def test_where_nothing_works_nothing_is_kept():
    def time_of(tiling):
        raise TrialError("no")

    bench = Bench(time_of)
    assert bench.search(point_of(DENSE, 8)) is None
    [told] = bench.of(Tuned)
    assert told.microseconds is None


def test_each_shape_is_measured_once_and_what_is_not_says_why():
    same_code = replace(DENSE, format=FORMATS["int4_row"])
    rare = DenseProduct(Ggml(Type.IQ2_XXS), 512, 512)
    found = points_of([EXPERTS, DENSE, same_code, rare, replace(DENSE, rows=2048)], [8, 4096])
    assert [(one.title, one.tokens, bool(one.candidates), one.reason) for one in found] == [
        ("experts nvfp4_words 24/4/320/192", 8, True, ""),
        ("experts nvfp4_words 24/4/320/192", 4096, True, ""),
        ("dense int4 96x320", 8, True, ""),
        ("dense int4 96x320", 4096, False, "PyTorch's product is faster"),
        ("dense iq2_xxs 512x512", 8, False, "the kernels do not read iq2_xxs"),
        ("dense iq2_xxs 512x512", 4096, False, "the kernels do not read iq2_xxs"),
        ("dense int4 2048x320", 8, True, ""),
        ("dense int4 2048x320", 4096, False, "PyTorch's product is faster"),
    ]


# gpt-oss, Qwen3.6, Qwen4, Gemma 4, Qwen3.
SIZES = [
    (32, 4, 2880, 2880),
    (256, 8, 2048, 512),
    (512, 10, 2560, 640),
    (128, 8, 2816, 704),
    (128, 8, 2048, 768),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("code", ["bf16", "int4", "mxfp4_words", "int4_words"])
def test_each_shape_has_candidates_whose_steps_end_with_its_columns(sizes, code):
    """Rows of words are padded, so that their steps may end elsewhere."""
    shape = ExpertShape(code, code, *sizes)
    for tokens in (1, 2, 8, 32, 64, 128, 512, 4096, 8192):
        groups = expert_candidates(shape, tokens)
        assert groups, tokens
        for gate_ups, downs in groups:
            for tilings, columns in ((gate_ups, shape.hidden), (downs, shape.inner)):
                assert code.endswith("_words") or any(columns % one.columns == 0 for one in tilings)
                for one in tilings:
                    assert one.columns & (one.columns - 1) == 0
                    assert one.splits == 1 or (tilings is downs and columns >= 2048)
            assert {one.tokens for one in (*gate_ups, *downs)} == {gate_ups[0].tokens}


def test_dense_candidates_share_columns_evenly_where_they_cannot_be_halved():
    found = dense_candidates(DenseShape("nvfp4_words", 2880, 2880), 8)
    assert any(one.splits == 3 and 2880 % (3 * one.columns) == 0 for one in found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("columns", [448, 2048, 2816, 2880, 4096])
@pytest.mark.parametrize("tokens", [1, 16, 32, 100])
def test_groups_of_warps_have_columns_enough_for_a_product_of_codes(tokens, columns):
    found = dense_candidates(DenseShape("nvfp4_words", 512, columns), tokens)
    assert all(one.columns >= 32 * one.depth for one in found)
    trials = DenseTrials(replace(DENSE, format=FORMATS["nvfp4_words"]), 1, DEVICE)
    with pytest.raises(LaunchError, match="needs 32 columns"):
        trials.run(tokens, Tiling(8, 16, 64, depth=4))


@pytest.mark.parametrize("product", [EXPERTS, DENSE])
def test_all_that_is_compiled_ahead_is_tried_or_made_of_what_is(product):
    point = point_of(product, 8)
    bench = Bench(cost)
    bench.search(point)

    def halves(tilings):
        pairs = ((one.gate_up, one.down) if isinstance(one, ExpertTiling) else (one,) for one in tilings)
        return {half for pair in pairs for half in pair}

    ahead = halves(to_compile(point))
    lacking = [one for one in halves(bench.asked) if one not in ahead]
    # Of dense products, one: the best again, but for one argument.
    assert len(lacking) <= isinstance(product, DenseProduct)
    assert ahead <= halves(bench.asked)


def test_a_process_outlives_what_raises_and_is_another_after_what_it_does_not_survive():
    process = TrialProcess(Hardy, seconds=60)
    try:
        first = process.ask("pid")
        assert first != os.getpid()
        with pytest.raises(TrialError, match="ValueError: two"):
            process.ask("raise")
        with pytest.raises(TrialError, match="ValueError: sizes are powers of 2"):
            process.ask("launch")
        assert process.ask("pid") == first
        with pytest.raises(TrialError, match="SIGSEGV"):
            process.ask("die")
        second = process.ask("pid")
        assert second != first
        process._seconds = 0.5
        with pytest.raises(TrialError, match="more than"):
            process.ask("hang")
        assert process._process is None
    finally:
        process.close()


def test_a_launch_that_fails_is_told_by_its_cause():
    error = LaunchError("gemm", "triton", Geometry((1, 1, 1), (32, 1, 1)), ["bf16[8]"], "CUDA error 1: bad")
    assert tune_process._in_words(error) == "LaunchError: CUDA error 1: bad"


def test_a_tiling_that_is_illegal_is_no_figure_and_costs_only_itself(monkeypatch):
    monkeypatch.setattr(tune_trials, "sets_of", lambda product, device: 1)
    monkeypatch.setattr(tune_trials, "replayed", lambda run: run() or 12.0)
    trials, good = Trials(DEVICE), Tiling(8, 32, 64)
    for bad in (replace(good, columns=48), replace(good, rows=24), replace(good, depth=4)):
        with pytest.raises(LaunchError):
            trials((DENSE, 8, bad))
    assert trials((DENSE, 8, good)).microseconds == 12.0


def test_a_device_that_is_poisoned_is_left():
    process = TrialProcess(Weak, seconds=60)
    try:
        first = process.ask("pid")
        with pytest.raises(TrialError, match="ValueError: two"):
            process.ask("raise")
        assert process.ask("pid") != first
    finally:
        process.close()


def test_a_table_is_made_with_all_that_goes_wrong_on_the_way(monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "_trials", Clock)
    compiled = []
    monkeypatch.setattr(tune, "compile_ahead", lambda *call: compiled.append(call))
    # One candidate has steps of 64 columns.
    product = ExpertProduct(FORMATS["bf16"], FORMATS["bf16"], 64, 8, 512, 256)
    points = find_tuner().points([product], [1, 2])
    path, events = tilings_path(tmp_path, GPU), []
    find_tuner().tune(points, GPU, path, events.append)
    found = read_user_table(path, GPU, {"experts": measurement_of})["experts"]
    assert [one.tokens for one in found] == [1, 2]
    for one in found:
        assert one.tiling.gate_up.rows != 32
        assert one.microseconds == round(cost(one.tiling), 1)
    reasons = {event.reason for event in events if isinstance(event, Dropped)}
    assert reasons == {"the process was killed by SIGKILL", "ValueError: no kernel"}
    [(trials, architecture, _)] = compiled
    assert architecture == GPU.architecture
    assert trials == [(product, point.tokens, tiling) for point in points for tiling in to_compile(point)]


@pytest.mark.parametrize("form", ["nvfp4_words", "bf16"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_trials_of_experts_compare_with_the_reference(tokens, form):
    trials = ExpertTrials(replace(SMALL, gate_up=FORMATS[form], down=FORMATS[form]), 2, DEVICE)
    assert trials.error(tokens, SMALL_TILING) < 6e-3
    one, other = (weights.down.parts["data"] for weights in trials.weights)
    assert torch.equal(one, other)
    assert one.data_ptr() != other.data_ptr()


def test_trials_of_dense_products_compare_with_the_reference():
    trials = DenseTrials(DENSE, 2, DEVICE)
    assert trials.error(5, Tiling(8, 32, 64, splits=2)) < 6e-3
    # One that writes nothing is wrong, whatever lay there before: that of the last one, likely.
    assert not trials.error(5, lambda *call: None) < tune_trials.WRONG


def test_wrong_numbers_are_not_timed(monkeypatch):
    monkeypatch.setattr(tune_trials, "sets_of", lambda product, device: 1)
    monkeypatch.setattr(tune_trials, "replayed", lambda run: run() or 12.0)
    trials = Trials(DEVICE)
    figures = trials((SMALL, 2, SMALL_TILING))
    assert figures.microseconds == 12.0
    real = tune_trials.tiled_experts
    monkeypatch.setattr(tune_trials, "tiled_experts", lambda *call: 1.1 * real(*call))
    figures = trials((SMALL, 2, SMALL_TILING))
    assert figures.microseconds is None
    assert figures.error == pytest.approx(0.1, rel=0.1)
    # Writes nothing.
    monkeypatch.setattr(tune_trials, "tiled_experts", lambda x, *rest: torch.empty_like(x))
    assert trials((SMALL, 2, SMALL_TILING)).microseconds is None
