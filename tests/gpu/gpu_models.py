"""Tiny models of every family, and in every form that weights are stored in."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from moebius_worker.engine.weights.schemes.ggml import BLOCK_TYPES
from tests.tiny import write_checkpoint
from tests.worker.checkpoint.gguf_models import FAMILIES, converted
from tests.worker.checkpoint.gguf_types import write_typed
from tests.worker.engine.models.harness import write_random
from tests.worker.engine.models.qwen_world import SCALES
from tests.worker.engine.models.test_qwen4_exp import FLASH

# As their quantisers write them.
CHECKPOINTS = sorted(
    path.parent for path in (Path(__file__).parents[1] / "data" / "checkpoints").glob("*/config.json")
)


def _qwen4(folder: Path) -> Path:
    return write_random(folder / "qwen4", Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**FLASH)), scales=SCALES)


def _int8(folder: Path, group: int | None) -> Path:
    """In compressed-tensors' INT8, a factor a row or group."""
    path = write_checkpoint(folder / "int8", hidden_size=128, intermediate_size=128, head_dim=32)
    tensors = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if tensor.ndim == 1 or name.startswith(("lm_head", "model.embed")) or name.endswith("gate.weight"):
            tensors[name] = tensor
            continue
        groups = (0.5 * tensor).unflatten(-1, (-1, group or tensor.shape[-1]))
        scale = groups.abs().amax(-1, keepdim=True) / 127
        tensors[name] = (groups / scale).round().to(torch.int8).flatten(1)
        tensors[f"{name}_scale"] = scale.squeeze(-1)
    save_file(tensors, path / "model.safetensors")
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    weights = {"type": "int", "num_bits": 8, "symmetric": True, **strategy}
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def _kept(path: Path, folder: Path) -> Path:
    return path


# By name: what writes the model into a folder, or knows where it is.
TINY_MODELS: Mapping[str, Callable[[Path], Path]] = {
    **{path.name: partial(_kept, path) for path in CHECKPOINTS},
    **{family: partial(converted, family) for family in FAMILIES},
    "qwen4_exp": _qwen4,
    "int8": partial(_int8, group=None),
    "int8 in groups": partial(_int8, group=32),
    **{type_.name: partial(write_typed, type_) for type_ in sorted(BLOCK_TYPES)},
}
