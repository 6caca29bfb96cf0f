"""The models of tests/data/gguf: their parameters, which follow from their names, and their files."""

import json
import lzma
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

DATA = Path(__file__).parents[2] / "data" / "gguf"
FAMILIES = sorted(path.name.removesuffix(".json") for path in DATA.glob("*.json"))


def original_config(family: str) -> dict[str, Any]:
    """The config.json that was converted."""
    return json.loads((DATA / f"{family}.json").read_text())


def converted(family: str, directory: Path) -> Path:
    """The file that llama.cpp's converter made, without a vocabulary."""
    path = directory / f"{family}.gguf"
    path.write_bytes(lzma.decompress((DATA / f"{family}.gguf.xz").read_bytes()))
    return path


def fill(model: torch.nn.Module) -> None:
    """Eighths, which fp32 adds exactly, at random; none of them 0. Every tensor has others."""
    tensors = dict(model.named_parameters())
    tensors |= {n: b for n, b in model.named_buffers() if n.endswith(("correction_bias", "layer_scalar"))}
    with torch.no_grad():
        for name, tensor in tensors.items():
            source = np.random.default_rng(zlib.crc32(name.encode()))
            shape = tuple(tensor.shape)
            values = source.integers(1, 8, shape) * source.choice([-1, 1], shape)
            tensor.copy_(torch.from_numpy(np.asarray(values / 8, dtype=np.float32)))


def original_model(family: str) -> torch.nn.Module:
    """The model that was converted, of transformers."""
    import transformers

    config = original_config(family)
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class(model_class.config_class(**{k: v for k, v in config.items() if k != "model_type"}))
    fill(model)
    return model.float()
