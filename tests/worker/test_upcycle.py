"""An upcycled model computes what the dense one computes; its files appear whole or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer import Typer
from typer.testing import CliRunner

from moebius_cli.upcycle import upcycle as command
from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from moebius_worker.checkpoint.tokenizer import tokenizer_files
from moebius_worker.engine.weights.open import open_weights
from moebius_worker.upcycle import UpcycleOptions, upcycle
from tests.tiny import VOCAB_SIZE, write_checkpoint
from tests.worker.checkpoint.gguf_files import write_llama_gguf

EXACT = UpcycleOptions(experts=3, top_k=2, dtype="float32")


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "dense", "llama")


def weights(path: Path) -> dict[str, torch.Tensor]:
    reader, _ = open_weights(open_checkpoint(str(path)))
    return {name: reader.read(name).clone() for name in reader.tensors}


def logits(path: Path, class_name: str) -> torch.Tensor:
    import transformers

    model = getattr(transformers, class_name).from_pretrained(path, dtype=torch.float32)
    ids = torch.randint(0, VOCAB_SIZE, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("source", ["safetensors", "gguf", "tied", "old config"])
def test_without_noise_the_logits_are_the_dense_models(tmp_path: Path, source: str) -> None:
    dense = write_checkpoint(tmp_path / "dense", "llama", tie_word_embeddings=source == "tied")
    if source == "old config":
        # Says little, as old ones do: then Llama's defaults hold, which are not Mixtral's.
        config = json.loads((dense / "config.json").read_text())
        del config["rope_parameters"], config["head_dim"]
        config["torch_dtype"] = "float16"
        (dense / "config.json").write_text(json.dumps(config))
    location = write_llama_gguf(tmp_path / "dense.gguf", dense) if source == "gguf" else dense
    moe = upcycle(str(location), tmp_path / "moe", EXACT)
    assert "torch_dtype" not in json.loads((moe / "config.json").read_text())
    difference = (logits(moe, "MixtralForCausalLM") - logits(dense, "LlamaForCausalLM")).abs().max()
    assert difference < 1e-4


def test_experts_are_copies_and_everything_else_is_kept(dense: Path, tmp_path: Path) -> None:
    moe, original = weights(upcycle(str(dense), tmp_path / "moe", EXACT)), weights(dense)
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in original.items():
        layer, found, part = name.partition(".mlp.")
        if found:
            stem = f"{layer}.block_sparse_moe.experts"
            expected |= {f"{stem}.{n}.{parts[part.split('.')[0]]}.weight": tensor for n in range(3)}
        else:
            expected[name] = tensor
    routers = {f"model.layers.{layer}.block_sparse_moe.gate.weight" for layer in range(2)}
    assert set(moe) == set(expected) | routers
    assert all(torch.equal(moe[name], tensor) for name, tensor in expected.items())
    assert all(moe[name].shape == (3, 64) for name in routers)
    config = open_checkpoint(str(tmp_path / "moe")).config
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (3, 2)
    assert tokenizer_files(open_checkpoint(str(tmp_path / "moe"))) == tokenizer_files(
        open_checkpoint(str(dense))
    )


def test_noise_makes_experts_differ_by_as_much_as_asked(dense: Path, tmp_path: Path) -> None:
    options = UpcycleOptions(experts=3, noise=0.05, seed=7, dtype="float32")
    moe = weights(upcycle(str(dense), tmp_path / "moe", options))
    original = weights(dense)["model.layers.1.mlp.up_proj.weight"]
    experts = [moe[f"model.layers.1.block_sparse_moe.experts.{n}.w3.weight"] for n in range(3)]
    for expert in experts:
        assert (expert - original).std() / original.std() == pytest.approx(0.05, rel=0.05)
    assert (experts[0] - experts[1]).std() / original.std() == pytest.approx(0.05 * 2**0.5, rel=0.05)

    again = weights(upcycle(str(dense), tmp_path / "again", options))
    assert all(torch.equal(moe[name], again[name]) for name in moe)
    other = weights(upcycle(str(dense), tmp_path / "other", UpcycleOptions(3, 2, 0.05, 8, "float32")))
    assert not torch.equal(other["model.layers.1.block_sparse_moe.experts.0.w3.weight"], experts[0])
    assert not torch.equal(
        other["model.layers.0.block_sparse_moe.gate.weight"],
        moe["model.layers.0.block_sparse_moe.gate.weight"],
    )


def test_routes_vary_from_token_to_token(dense: Path, tmp_path: Path) -> None:
    moe = upcycle(str(dense), tmp_path / "moe", UpcycleOptions(experts=4, dtype="float32"))
    from transformers import MixtralForCausalLM

    model = MixtralForCausalLM.from_pretrained(moe)
    ids = torch.randint(0, VOCAB_SIZE, (1, 200), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        router_logits = model(ids, output_router_logits=True).router_logits
    for layer in router_logits:
        used = torch.bincount(layer.topk(2).indices.flatten(), minlength=4) / 400
        assert used.min() > 0.05
        assert 0.5 < layer.std() < 5


def test_large_models_are_written_in_shards(dense: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    whole = upcycle(str(dense), tmp_path / "whole", EXACT, progress=lambda *call: calls.append(call))
    shards = upcycle(str(dense), tmp_path / "shards", EXACT, shard_bytes=200_000)
    files = sorted(file.name for file in shards.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    sizes = [sum(t.nbytes for t in load_file(shards / file).values()) for file in files]
    assert max(sizes) <= 200_000
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes) == calls[-1][1] == calls[-1][2]
    one, many = weights(whole), weights(shards)
    assert set(one) == set(many)
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert torch.equal(logits(whole, "MixtralForCausalLM"), logits(shards, "MixtralForCausalLM"))


def test_the_dtype_is_as_asked(dense: Path, tmp_path: Path) -> None:
    moe = upcycle(str(dense), tmp_path / "moe", UpcycleOptions(dtype="bfloat16"))
    assert {tensor.dtype for tensor in weights(moe).values()} == {torch.bfloat16}
    assert json.loads((moe / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_interrupted_run_leaves_nothing(dense: Path, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        upcycle(str(dense), tmp_path / "moe", EXACT, progress=interrupt)
    assert sorted(tmp_path.iterdir()) == before


def test_an_occupied_destination_is_left_alone(dense: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert (upcycle(str(dense), empty, EXACT) / "config.json").is_file()
    for occupied in (empty, tmp_path / "dense" / "config.json"):
        with pytest.raises(CheckpointError, match=r"exists already\. Give another destination"):
            upcycle(str(dense), occupied, EXACT)


def test_a_destination_that_cannot_be_written_is_an_error(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"Cannot write .*file/moe"):
        upcycle(str(dense), tmp_path / "file" / "moe", EXACT)


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("mixtral", {}, "source is a MixtralForCausalLM"),
        ("llama", {"attention_bias": True}, "source has attention_bias"),
        ("llama", {"hidden_act": "gelu"}, "source computes 'gelu'"),
    ],
)
def test_other_sources_are_refused_by_name(
    tmp_path: Path, family: str, config: dict[str, Any], message: str
) -> None:
    source = write_checkpoint(tmp_path / "source", family, **config)
    with pytest.raises(CheckpointError, match=message):
        upcycle(str(source), tmp_path / "moe", EXACT)
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (UpcycleOptions(experts=2, top_k=3), "3 of 2 experts"),
        (UpcycleOptions(experts=0, top_k=0), "0 of 0 experts"),
        (UpcycleOptions(noise=-0.1), "noise must be 0 or more"),
        (UpcycleOptions(noise=float("nan")), "noise must be 0 or more"),
        (UpcycleOptions(dtype="int8"), "'int8'"),
    ],
)
def test_options_that_make_no_model_are_refused(
    dense: Path, tmp_path: Path, options: UpcycleOptions, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        upcycle(str(dense), tmp_path / "moe", options)


def test_the_command(dense: Path, tmp_path: Path) -> None:
    app, runner = Typer(), CliRunner()
    app.command()(command)
    done = runner.invoke(app, [str(dense), str(tmp_path / "moe"), "--experts", "2", "--noise", "0.1"])
    assert done.exit_code == 0, done.output
    assert f"moebius up --model {tmp_path / 'moe'}" in done.output
    assert open_checkpoint(str(tmp_path / "moe")).config["num_local_experts"] == 2

    again = runner.invoke(app, [str(dense), str(tmp_path / "moe")])
    assert again.exit_code == 1
    assert "exists already" in again.stderr
    assert "Traceback" not in again.output
    told = runner.invoke(app, ["--help"]).output
    assert all(option in told for option in ("--experts", "--top-k", "--noise", "--seed", "--dtype"))
