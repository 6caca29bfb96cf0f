"""GGUF's keys of the rotary embedding, told as `rope_parameters`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.keys import Keys, Value, head_dim

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# GGUF's keys under `rope.scaling.`, and what YaRN's parameters are called.
_YARN = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
    "attn_factor": "attention_factor",
}


def rope(keys: Keys) -> dict[str, Any]:
    """`rope_parameters` of a model that turns whole heads."""
    keys.only("rope.dimension_count", head_dim(keys))
    return {"rope_theta": keys.get("rope.freq_base", 10000.0), **_scaling(keys)}


def partial_rope(default: float) -> Value:
    """Of a model that turns the first part of a head; `default` is how much if the file does not say."""

    def value(keys: Keys) -> dict[str, Any]:
        dim = head_dim(keys)
        turned = keys.get("rope.dimension_count", int(default * dim))
        theta = keys.get("rope.freq_base", 10000.0)
        return {"rope_theta": theta, "partial_rotary_factor": turned / dim, **_scaling(keys)}

    return value


def yarn_rope(dim: Callable[[Keys], int], multiplier_scale: float, extra: dict[str, Value]) -> Value:
    """Of a model whose YaRN has a magnitude of its own (`mscale`).

    `dim`: how many dimensions turn. `multiplier_scale`: how much the stored multiplier is of `mscale_all_dim`
    (0.1 in DeepSeek's files). `extra`: further parameters.
    """

    def value(keys: Keys) -> dict[str, Any]:
        keys.only("rope.dimension_count", dim(keys))
        parameters = {"rope_theta": keys.get("rope.freq_base", 10000.0), **_scaling(keys)}
        multiplier = keys.get("rope.scaling.yarn_log_multiplier")
        if multiplier is not None and parameters["rope_type"] == "yarn":
            # Released models have both alike, which leaves the frequencies' own magnitude at 1.
            magnitude = round(multiplier / multiplier_scale, 6)
            parameters |= {"mscale": magnitude, "mscale_all_dim": magnitude}
        return parameters | {name: value(keys) for name, value in extra.items()}

    return value


def _scaling(keys: Keys) -> dict[str, Any]:
    if keys.has("rope_freqs.weight"):
        keys.only("rope.scaling.type", "none", "llama3")
        return _llama3_rope(keys)
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", 1.0)
    linear = keys.get("rope.scale_linear")  # how older files say it
    keys.get("rope.scaling.original_context_length")
    if kind == "none":
        return {"rope_type": "default"} if linear in (None, 1.0) else _linear(linear)
    if kind == "linear":
        return _linear(factor)
    if kind == "yarn":
        keys.only("rope.scaling.yarn_ext_factor", 1.0)
        stored = {name: keys.get(f"rope.scaling.{key}") for key, name in _YARN.items()}
        return {"rope_type": "yarn"} | {name: value for name, value in stored.items() if value is not None}
    raise CheckpointError(f"{keys.gguf.path}: {keys.prefix}rope.scaling.type = {kind!r} is not supported.")


def _linear(factor: float) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": factor}


def frequency_divisors(keys: Keys) -> np.ndarray:
    """The tensor rope_freqs.weight, fp32 [pairs]: what the frequencies are divided by."""
    tensor = keys.gguf.tensors["rope_freqs.weight"]
    if tensor.type.name != "F32":
        raise CheckpointError(f"Tensor rope_freqs.weight in {tensor.file} is {tensor.type.name}, not F32.")
    return np.fromfile(tensor.file, "<f4", tensor.shape[-1], offset=tensor.offset)


def _llama3_rope(keys: Keys) -> dict[str, Any]:
    """Llama 3's rope scaling, found from what llama.cpp stores of it: the divisors of the frequencies."""
    divisors = frequency_divisors(keys)
    if np.all(divisors == 1):
        return {"rope_type": "default"}
    factor = float(divisors.max())
    wavelengths = (
        2 * np.pi * keys.get("rope.freq_base", 10000.0) ** (np.arange(len(divisors)) / len(divisors))
    )
    low, high, original = _LLAMA3_ROPE.values()
    # 0 for frequencies that turn less than `low` times in the original context, 1 above `high` times.
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise CheckpointError(
            f"{keys.gguf.path}: the tensor rope_freqs.weight describes a rope scaling that is not Llama 3's "
            f"({_LLAMA3_ROPE}), which is the only one of its kind supported."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
