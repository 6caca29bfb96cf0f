"""The bench of the engine: what it says a step needs at least, and that it runs, on a model without a GPU."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius_kernels.operations import REFERENCE
from moebius_kernels.plan import Choice, Plan, Verdict
from moebius_kernels.registry import TokenRange
from moebius_kernels.router import Route
from moebius_worker.checkpoint.checkpoint import open_checkpoint
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model
from moebius_worker.engine.probation import Probation
from moebius_worker.engine.runner import ModelRunner, RunnerOptions
from moebius_worker.engine.weights.dummy import FORMS, DummyWeights
from moebius_worker.engine.weights.load import plan_loading
from tests.bench.engine_floors import FLOPS, prefill_operations, step_bytes
from tests.bench.engine_plan import backends_of, failures, told
from tests.bench.engine_streams import DecodingStreams
from tests.bench.gpu_engine import MODELS, line, main, shortened, spread
from tests.bench.gpu_stack import TINY
from tests.worker.engine.engine_world import decodes, load, write_model

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
    first, second, last = (step_bytes(model, streams, 256) for streams in (1, 2, 128))
    share = model.expert_share
    experts = one / share * 1e9
    each = second - first - experts * share * (1 - share)
    assert 0 < each < 0.2e9
    assert last - first == pytest.approx((many - one) * 1e9 + 127 * each, rel=0.05)


def test_fewer_layers() -> None:
    few = shortened(MODELS["gemma-4-26b"], 6)["text_config"]
    assert few["num_hidden_layers"] == len(few["layer_types"]) == 6
    assert shortened(MODELS["qwen3-30b"], 2)["num_hidden_layers"] == 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("flags", [(), ("--probation",)])
def test_its_rows(
    flags: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(MODELS, "tiny", TINY)
    monkeypatch.setenv("MOEBIUS_CACHE_DIR", str(tmp_path))
    # It would stay for all tests that come later.
    monkeypatch.setattr("gc.set_threshold", lambda threshold: None)
    out = tmp_path / "figures.json"
    sizes = ("--streams", "1", "3", "--steps", "4", "--prefill", "200")
    waits: list[Probation] = []
    monkeypatch.setattr(Probation, "wait", lambda probation: waits.append(probation))
    main(["tiny:bf16", "--device", "cpu", *sizes, "--out", str(out), *flags])
    assert bool(waits) == bool(flags)
    rows = json.loads(out.read_text())
    assert [row.get("streams") or row["prefill"] for row in rows] == [1, 3, 200]
    printed = capsys.readouterr().out
    assert "no such call" not in printed
    for row, tokens in zip(rows, (1, 3, 200), strict=True):
        assert row["case"] == "tiny:bf16"
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["ms"])
        assert row["floor"] == pytest.approx(row["floor_ms"] / row["ms"])
        # A CPU has no graphs, and nothing but references.
        assert ("graph_ms" in row) == ("streams" in row)
        assert row.get("graph_ms") is None
        assert {"linear", "routed_experts", "paged_attention"} <= row["backends"].keys()
        assert all(names == ["reference"] for names in row["backends"].values())
        assert f"{row['tokens_per_s']:.0f} tok/s" in printed
        # The head sees but the last of a prompt's tokens, and what is drawn is drawn from that.
        assert ("draw_tokens" in row["backends"]) == ("streams" in row)
    assert rows[0]["experts"] == 1
    assert 0.5 < rows[1]["experts"] < 1.5


def test_models_that_hit_few_experts_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = RunnerOptions(dummy_weights="bf16", kv_cache_bytes=1 << 24, max_running=8, max_step_tokens=512)
    runner = ModelRunner.load(open_checkpoint(str(tmp_path)), options)
    apart = spread(runner, REFERENCE, 8)

    def alike(x: torch.Tensor, *rest: Any, **more: Any) -> Route:
        return REFERENCE.topk_softmax(x[:1].expand_as(x), *rest, **more)

    together = spread(runner, replace(REFERENCE, topk_softmax=alike), 8)
    # 2 of 8 experts, where uniform routing hits 7.2 in a step of 8.
    assert together == pytest.approx(2 / (8 * (1 - 0.75**8)))
    assert apart > 0.7
    row = {
        "streams": 8,
        "tokens_per_s": 1.0,
        "ms": 1.0,
        "floor_ms": 1.0,
        "floor": 1.0,
        "backends": {"a": ["b"]},
    }
    assert "ONLY 28% OF THE EXPERTS" in line(row | {"experts": together})
    assert "ONLY" not in line(row | {"experts": 0.95})


@pytest.mark.parametrize("ahead", [False, True])
def test_a_turn_is_a_step_of_all_streams(
    tmp_path: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(write_model(tmp_path, "full"))
    launched: list[int] = []
    launch = runner.launch

    def noted(slices, *rest):
        launched.append(len(slices))
        return launch(slices, *rest)

    monkeypatch.setattr(runner, "launch", noted)
    monkeypatch.setattr(runner, "captured", lambda slices: ahead and decodes(slices))
    streams = DecodingStreams(runner, REFERENCE.draw_tokens, 3, prompt=9, warm=4, output=12)
    for turns in range(1, 4):
        before = streams.said
        streams.turn()
        assert streams.said == before + 3
        # The prompts' step says the first tokens; the step after those that are known is on its way.
        steps = streams.said // 3 - 1
        assert launched == ([3] * (steps + 1) if ahead else []), turns
    while streams.said < 3 * 12:
        streams.turn()
    with pytest.raises(AssertionError, match="all has been said"):
        streams.turn()


def test_backends_by_tokens() -> None:
    few, many = TokenRange(1, 128), TokenRange(129, 8192)
    good, wrong = Verdict("triton"), Verdict("cublas_fp8", "numbers", "wrong")
    refused = Verdict("triton_fp8", "admission", "it is for 32 tokens and more")
    plan = Plan(
        (
            Choice("linear", "layers", few, "triton", True, (good, wrong)),
            Choice("linear", "layers", many, "cublas_fp8", False, ()),
            Choice("linear", "router", many, "triton", False, ()),
            Choice("routed_experts", "", few, "triton", True, (refused,)),
            Choice("routed_experts", "", many, "triton_fp8", False, ()),
            Choice("rms_norm", "", many, "triton", False, ()),
            Choice("gated", "", many, "triton", False, ()),
        )
    )
    assert backends_of(plan, 128) == {"linear": ["triton"], "routed_experts": ["triton"]}
    assert told(backends_of(plan, 128)) == "all by triton"
    assert backends_of(plan, 8192)["linear"] == ["cublas_fp8", "triton"]
    assert (
        told(backends_of(plan, 8192))
        == "linear by cublas_fp8+triton, routed_experts by triton_fp8, all else by triton"
    )
    assert failures(plan) == ["linear:cublas_fp8 failed at the gate numbers (1 times)"]
