"""What the bench of the engine says a step needs at least."""

import json
from pathlib import Path

import pytest
import torch

from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model
from moebius_worker.engine.weights.dummy import FORMS, DummyWeights
from moebius_worker.engine.weights.load import plan_loading
from tests.bench.gpu_engine import FLOPS, MODELS, prefill_operations, shortened, step_bytes

META = torch.device("meta")


def sized(name: str, form: str, directory: Path) -> Decoder:
    """Without memory."""
    (directory / "config.json").write_text(json.dumps(MODELS[name]))
    place = Place(META, torch.bfloat16)
    model = build_model(open_checkpoint(str(directory)).config, place)
    weights = DummyWeights(model.slots(), FORMS[form], META)
    loading = plan_loading(weights, weights, model.slots(), model.ignores, dtype=place.dtype, expand=False)
    loading.allocate(place)
    return model


# By hand, of the configs: ms of 8,192 tokens, and GB of experts in a step of one stream and of 128.
KNOWN = {
    ("qwen3-30b", "bf16"): (56.6, 3.62, 58.0),
    ("qwen3-30b", "nvfp4"): (56.6, 1.02, 16.3),
    ("gpt-oss-20b", "mxfp4"): (62.8, 1.27, 10.2),
    ("gemma-4-26b", "nvfp4"): (64.0, 0.80, 12.8),
    ("qwen3.6-35b", "nvfp4"): (50.5, 0.57, 17.8),
}


@pytest.mark.parametrize(("name", "form"), KNOWN)
def test_floors(name: str, form: str, tmp_path: Path) -> None:
    model = sized(name, form, tmp_path)
    milliseconds, one, many = KNOWN[name, form]
    assert 1e3 * prefill_operations(model, 8192) / FLOPS == pytest.approx(milliseconds, rel=0.002)
    # All else is a constant and something for each stream; what is known is rounded.
    first, second, last = (step_bytes(model, streams) for streams in (1, 2, 128))
    share = model.expert_share
    experts = one / share * 1e9
    each = second - first - experts * share * (1 - share)
    assert 0 < each < 0.2e9
    assert last - first == pytest.approx((many - one) * 1e9 + 127 * each, rel=0.05)


def test_fewer_layers() -> None:
    few = shortened(MODELS["gemma-4-26b"], 6)["text_config"]
    assert few["num_hidden_layers"] == len(few["layer_types"]) == 6
    assert shortened(MODELS["qwen3-30b"], 2)["num_hidden_layers"] == 2
