"""Cuts a Qwen3-MoE checkpoint to its first layer, two experts and 64 tokens: `cut.py SOURCE DESTINATION`."""

import json
import re
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EXPERTS, VOCABULARY = 2, 64


def kept(name: str) -> bool:
    expert = re.search(r"\.experts\.(\d+)\.", name)
    return ".layers." not in name or (".layers.0." in name and (not expert or int(expert[1]) < EXPERTS))


def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return tensor[:VOCABULARY].contiguous()
    return tensor[:EXPERTS].contiguous() if name.endswith("mlp.gate.weight") else tensor


def main(source: Path, destination: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    small = {name: cut(name, tensor) for name, tensor in tensors.items() if kept(name)}
    save_file(small, destination / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config |= {
        "num_hidden_layers": 1,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": min(EXPERTS, config["num_experts_per_tok"]),
        "vocab_size": VOCABULARY,
    }
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
