"""A checkpoint of random weights, so large that a second copy in memory, or the time to load it, shows."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def write_large(path: Path, layers: int = 6, shards: int = 4) -> int:
    """In bf16; returns its bytes, which are 30 million a layer and 34 million beside."""
    config = CONFIG | {"num_hidden_layers": layers}
    slots = build_model(config, Place(torch.device("meta"), torch.bfloat16)).slots()
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names, total = list(slots), 0
    weight_map: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        tensors = {
            name: torch.empty(slots[name].shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name in chosen
        }
        save_file(tensors, path / file)
        weight_map |= dict.fromkeys(chosen, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total
