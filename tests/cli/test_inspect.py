"""`moebius inspect`: what it says of checkpoints, and how it refuses what cannot be served."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from moebius_cli.main import app
from tests.tiny import write_checkpoint
from tests.worker.checkpoint.gguf_files import write_llama_gguf
from tests.worker.checkpoint.gguf_models import original_config, original_model
from tests.worker.engine.schemes.stored_tensors import CHECKPOINTS

# The form of the routed experts.
EXPECTED = {
    "gemma4_moe-nvfp4-modelopt": "nvfp4",
    "gpt_oss-mxfp4": "mxfp4",
    "mixtral-nvfp4-modelopt": "nvfp4",
    "qwen3_moe-FP8_BLOCK-ct": "fp8 128x128",
    "qwen3_moe-FP8_DYNAMIC-ct": "fp8",
    "qwen3_moe-NVFP4-ct": "nvfp4",
    "qwen3_moe-fp8-modelopt": "fp8",
    "qwen3_moe-nvfp4-modelopt": "nvfp4",
    "qwen3_moe_wide-MXFP4-ct": "mxfp4",
    "qwen3_moe_wide-W4A16-ct": "int4 g128",
    "qwen3_moe_wide-auto_awq": "int4 g128",
    "qwen3_moe_wide-auto_gptq": "int4 g128",
}


def run(*arguments: str | Path):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def found(*arguments: str | Path):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_checkpoint_of_the_tests_is_expected() -> None:
    assert {path.parent.name for path in CHECKPOINTS.glob("*/config.json")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_forms_sizes_and_bytes_of_quantised_checkpoints(name: str) -> None:
    seen = found(CHECKPOINTS / name)
    kinds = {row["kind"]: row for row in seen["kinds"]}
    assert any(form.startswith(EXPECTED[name]) for form in kinds["routed experts"]["forms"])
    tensors = load_file(CHECKPOINTS / name / "model.safetensors")
    assert seen["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert seen["memory"]["as stored"] < seen["memory"]["expanded to bfloat16"]
    # Those named wide have no more experts than a token goes to.
    assert (seen["active"] < seen["parameters"]) is ("wide" not in name)
    assert all(tokens > 1000 for tokens in seen["fits"].values())


def test_tables_for_people() -> None:
    result = run(CHECKPOINTS / "gpt_oss-mxfp4")
    assert result.exit_code == 0
    for words in ("GptOssForCausalLM", "mxfp4", "routed experts", "context", "window", "fits"):
        assert words in result.stdout


def test_parameters_and_kinds_are_those_of_the_files(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "mixtral")
    seen = found(path)
    tensors = load_file(path / "model.safetensors")
    assert seen["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    experts = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name)
    kinds = {row["kind"]: sum(row["forms"].values()) for row in seen["kinds"]}
    assert kinds["routed experts"] == experts
    assert kinds.keys() == {"routed experts", "attention", "embeddings", "head", "router", "norms"}
    # Of four experts a token goes to two.
    assert seen["active"] == seen["parameters"] - experts // 2
    # Keys and values of 2 layers, 2 heads of 16 numbers, 2 bytes each.
    assert seen["token_bytes"] == 2 * 2 * 2 * 16 * 2


def test_whether_it_fits(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "llama")
    [weights] = found(path)["memory"].values()
    [tokens] = found(path, "--memory", str(weights + 10 * found(path)["token_bytes"]))["fits"].values()
    assert tokens == 10
    [tokens] = found(path, "--memory", str(weights))["fits"].values()
    assert tokens is None
    assert "does not fit" in run(path, "--memory", "1kB").stdout


def test_gguf(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "mixtral")
    seen = found(write_llama_gguf(tmp_path / "model.gguf", source))
    assert (seen["container"], seen["architecture"]) == ("gguf", "MixtralForCausalLM")
    assert seen["parameters"] == found(source)["parameters"]


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(CHECKPOINTS / "gemma4_moe-nvfp4-modelopt", path)
    tensors = load_file(path / "model.safetensors")
    tensors |= {f"model.vision_tower.layer.{n}.weight": torch.ones(3) for n in range(4)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert found(path)["left_out"] == {"model.vision_tower": 4}
    assert "4 tensors model.vision_tower.*" in run(path).stdout


def test_layers_that_guess_further_tokens_are_told_as_left_out(tmp_path: Path) -> None:
    original_model("glm4_moe").save_pretrained(tmp_path)
    layers = original_config("glm4_moe")["num_hidden_layers"]
    further = {f"model.layers.{layers}.{name}.weight": torch.ones(2, 2) for name in ("eh_proj", "enorm")}
    save_file(load_file(tmp_path / "model.safetensors") | further, tmp_path / "model.safetensors")
    assert found(edited(tmp_path, num_nextn_predict_layers=1))["left_out"] == {f"model.layers.{layers}": 2}
    refused = run(edited(tmp_path, num_nextn_predict_layers=0))
    assert "2 tensors that the model has no place for" in refused.stderr


def edited(path: Path, **changes: object) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def without(path: Path, name: str) -> Path:
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


BROKEN = {
    "unknown family": (
        lambda path: edited(path, architectures=["JambaForCausalLM"]),
        "JambaForCausalLM is not supported. Supported are",
    ),
    "unknown quantisation": (
        lambda path: edited(path, quantization_config={"quant_method": "hqq"}),
        "quantised with hqq, which is not supported",
    ),
    "undeclared quantisation": (
        lambda path: (path / "hf_quant_config.json").unlink() or edited(path, quantization_config=None),
        "weight_scale",
    ),
    "missing scale": (
        lambda path: without(path, "model.layers.0.mlp.experts.3.up_proj.weight_scale"),
        "model.layers.0.mlp.experts.3.up_proj.weight_scale",
    ),
    "missing tensor": (lambda path: without(path, "model.norm.weight"), "model.norm.weight [64]"),
    "wrong sizes": (
        lambda path: edited(path, moe_intermediate_size=96),
        "tensors have another shape than the model",
    ),
    "truncated": (
        lambda path: (path / "model.safetensors").write_bytes(
            (path / "model.safetensors").read_bytes()[:-100]
        ),
        "truncated or damaged",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_served_is_refused_as_the_worker_would(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(CHECKPOINTS / "qwen3_moe-nvfp4-modelopt", path)
    spoil, words = BROKEN[kind]
    spoil(path)
    result = run(path)
    assert result.exit_code == 1
    assert words in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "plenty"], "'plenty' is no size"),
        (["--dtype", "int3"], "'int3' is not supported"),
    ],
)
def test_bad_arguments(arguments: list[str], words: str) -> None:
    result = run(CHECKPOINTS / "gpt_oss-mxfp4", *arguments)
    assert result.exit_code == 1
    assert words in result.stderr
