"""Loading, its refusals, and the edges of a step. That the logits are right is in models/."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from moebius_worker.engine.memory import OutOfMemoryPlan
from moebius_worker.engine.runner import ModelRunner, PlannedModel, RunnerOptions
from moebius_worker.engine.types import Slice
from tests.tiny import VOCAB_SIZE, write_checkpoint

# 2 layers, keys and values of 2 heads of 16 numbers, 4 bytes each.
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


@pytest.fixture
def path(tmp_path):
    return write_checkpoint(tmp_path, "mixtral")


def load(path, progress=lambda phase, done, total: None, **options):
    return ModelRunner.load(
        open_checkpoint(str(path)), RunnerOptions(**({"device": "cpu"} | options)), progress
    )


def test_attributes_and_progress(path):
    seen = []
    runner = load(path, lambda *report: seen.append(report), page_size=8, kv_cache_bytes=10 * 8 * TOKEN_BYTES)
    assert (runner.architecture, runner.vocab_size) == ("MixtralForCausalLM", VOCAB_SIZE)
    assert (runner.device_name, runner.dtype_name) == ("cpu", "float32")
    assert (runner.layout.page_size, runner.layout.num_pages, runner.max_model_len) == (8, 10, 80)
    phases, done, totals = zip(*seen, strict=True)
    assert set(phases) == {"loading weights"}
    assert list(done) == sorted(done)
    assert done[-1] == totals[-1] > 0


def test_weights_are_read_once_whoever_asks_first(path):
    seen = []
    planned = PlannedModel.of(open_checkpoint(str(path)), RunnerOptions(device="cpu"))
    assert planned.leaves_room
    planned.read(lambda *report: seen.append(report))
    count = len(seen)
    assert count > 0
    ModelRunner.of(planned, lambda *report: seen.append(report))
    assert len(seen) == count


def test_a_reading_that_failed_is_done_again(path, monkeypatch):
    planned = PlannedModel.of(open_checkpoint(str(path)), RunnerOptions(device="cpu"))
    with monkeypatch.context() as broken:
        broken.setattr(planned.loading.reader, "read", lambda name: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            planned.read(lambda *_: None)
    runner = ModelRunner.of(planned)
    step = [Slice(1, (5, 6, 7), 0, (0, 1), True)]
    assert torch.equal(runner.step(step).logits, load(path).step(step).logits)


class Graphs:
    """Fits everything, and knows another answer than the model."""

    def fits(self, slices):
        return True

    def run(self, slices, drawn):
        return torch.ones(len(slices), VOCAB_SIZE)


def test_graphs_are_left_out_as_long_as_steps_are_eager(path):
    runner, step = load(path), [Slice(1, (5,), 0, (0,), True)]
    expected = runner.step(step).logits
    runner._graphs = Graphs()
    assert runner.captured(step)
    assert torch.equal(runner.step(step).logits, torch.ones(1, VOCAB_SIZE))
    runner.eager = lambda: True
    assert not runner.captured(step)
    assert torch.equal(runner.step(step).logits, expected)


def test_the_models_own_length_is_the_limit_where_memory_is_ample(path):
    assert load(path).max_model_len == 2048
    assert load(path, max_model_len=100).max_model_len == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "'tpu' is not supported"),
        ({"dtype": "int8"}, "'int8' is not supported"),
        ({"max_model_len": 4096}, "4096 is more than the 2048"),
    ],
)
def test_options_that_cannot_be_are_refused(path, options, message):
    with pytest.raises(CheckpointError, match=message):
        load(path, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(path):
    with pytest.raises(CheckpointError, match="finds no GPU"):
        load(path, device="cuda")


def test_a_cache_that_cannot_be_is_refused(path):
    with pytest.raises(OutOfMemoryPlan):
        load(path, kv_cache_bytes=1 << 50)


def test_weights_that_do_not_fit_are_refused(path):
    file = path / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="q_norm"):
        load(path)


def test_only_slices_that_sample_have_logits(path):
    runner = load(path)
    ids = tuple(range(20))
    whole = runner.step([Slice(0, ids, 0, (0, 1), sample=True)]).logits
    parts = [Slice(0, ids[:12], 0, (2, 3), sample=False), Slice(1, ids, 0, (4, 5), sample=True)]
    both = runner.step(parts).logits
    torch.testing.assert_close(both, whole, atol=1e-5, rtol=0)
    none = runner.step([Slice(2, ids[:3], 0, (6,), sample=False)]).logits
    assert none.shape == (0, VOCAB_SIZE)
    torch.testing.assert_close(
        runner.step([Slice(0, ids[12:], 12, (2, 3), sample=True)]).logits, whole, atol=1e-5, rtol=0
    )


def test_a_token_beyond_the_vocabulary_is_an_error_before_anything_is_computed(path):
    runner = load(path)
    with pytest.raises(ValueError, match=f"request 7 holds the token id {VOCAB_SIZE}"):
        runner.step([Slice(7, (1, VOCAB_SIZE), 0, (0,), sample=True)])


def test_a_fault_in_any_row_is_told_though_the_logits_are_finite(path):
    runner = load(path)
    runner._model.embedding.data[5] = float("nan")
    step = runner.step(
        [
            Slice(1, (7, 8, 9), 0, (0,), sample=True),
            Slice(2, (5, 8, 9), 0, (1,), sample=True),
            Slice(3, (7, 5, 9), 0, (2,), sample=False),
            Slice(4, (7,), 0, (3,), sample=True),
        ]
    )
    assert step.logits.isfinite().all(), "the fault does not show in the last row"
    assert step.faulty() == {2, 3}


def test_a_fault_in_keys_and_values_alone_is_told(path):
    """They are zeroed where they are kept, so that nothing else would show it."""
    runner = load(path)
    runner._model.layers[-1].attention.qkv.weight.data[-1] = float("nan")
    assert runner.step([Slice(1, (7, 8, 9), 0, (0,), sample=False)]).faulty() == {1}


def test_each_layer_is_progress(path):
    calls = []
    runner = load(path)
    runner.step([Slice(1, (7, 8, 9), 0, (0,), sample=True)], lambda: calls.append(1))
    assert len(calls) == 2


def test_threads(path):
    before = torch.get_num_threads()
    load(path, threads=before + 1)
    assert torch.get_num_threads() == before + 1
