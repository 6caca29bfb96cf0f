"""FP8 as DeepSeek's and Qwen's checkpoints have it: in blocks or, without a block size, per tensor."""

from collections.abc import Mapping
from typing import Any

from moebius_worker.engine.weights.schemes.declared import DeclaredScheme
from moebius_worker.engine.weights.schemes.fp8_layout import Fp8Layout, block_size
from moebius_worker.engine.weights.schemes.patterns import matcher


def fp8_scheme(config: Mapping[str, Any]) -> DeclaredScheme:
    """Raises CheckpointError for a bad block size."""
    rounded = config.get("activation_scheme") in ("dynamic", "static")
    if (declared := config.get("weight_block_size")) is None:
        layout, name = Fp8Layout("weight_scale", activations=rounded), "fp8"
    else:
        block = block_size(declared, "fp8")
        layout = Fp8Layout("weight_scale_inv", block, rounded)
        name = f"fp8 {block[0]}x{block[1]}"
    excluded = matcher(config.get("modules_to_not_convert") or config.get("ignored_layers") or ())
    return DeclaredScheme(name, lambda module: None if excluded(module) else layout)
