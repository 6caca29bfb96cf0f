"""The quantisers' own checkpoints, as they are stored and expanded, against transformers with their values.

The reference holds what plain dequantisers in numpy make of the files. gpt-oss is in models/test_gpt_oss.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from moebius_worker.engine.weights.schemes.kv_scales import is_kv_scale
from tests.worker.engine.models.harness import check_chunks, check_mixed_batches, load
from tests.worker.engine.schemes.stored_tensors import CHECKPOINTS, vendor
from tests.worker.engine.schemes.test_vendor_checkpoints import EXPECTED, of_module, weights

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def values(name: str) -> dict[str, torch.Tensor]:
    """What the checkpoint's parameters are, in fp32."""
    _, oracle = EXPECTED[name]
    found = vendor(name)
    matrices = weights(found.infos)
    tensors = {
        weight: torch.from_numpy(
            oracle(of_module(found.raw, weight.removesuffix(".weight"))) if quantised else found.raw[weight]
        ).float()
        for weight, quantised in matrices.items()
    }
    modules = {weight.removesuffix(".weight") for weight in matrices}
    for parameter, array in found.raw.items():
        if parameter.rpartition(".")[0] not in modules and not is_kv_scale(parameter):
            tensors[parameter] = torch.from_numpy(array).float()
    return tensors


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the experts of each layer in one tensor, as Gemma 4 in floating point has them."""
    parts: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    others = {}
    for name, tensor in tensors.items():
        if found := EXPERT.fullmatch(name):
            parts.setdefault((found[1], found[3]), {})[int(found[2])] = tensor
        else:
            others[name] = tensor
    stacks = {key: torch.stack([experts[e] for e in range(len(experts))]) for key, experts in parts.items()}
    for prefix, part in stacks:
        if part == "gate_proj":
            gate_up = torch.cat([stacks[prefix, "gate_proj"], stacks[prefix, "up_proj"]], dim=1)
            others[f"{prefix}.gate_up_proj"] = gate_up
            others[f"{prefix}.down_proj"] = stacks[prefix, "down_proj"]
    return others


def reference(name: str, path: Path) -> torch.nn.Module:
    config = json.loads((CHECKPOINTS / name / "config.json").read_text())
    del config["quantization_config"]
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    tensors = values(name)
    if config["model_type"].startswith("gemma4"):
        tensors = fused(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path / "model.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    return model.eval()


@pytest.mark.parametrize("name", EXPECTED)
def test_logits(name: str, tmp_path: Path) -> None:
    model = reference(name, tmp_path / "float")
    for expand in (False, True):
        runner = load(CHECKPOINTS / name, expand_weights=expand)
        check_chunks(runner, model)
        check_mixed_batches(runner, model)
