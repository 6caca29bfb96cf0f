"""Reads rotary settings, in their old form (rope_theta, rope_scaling) and the new (rope_parameters)."""

from collections.abc import Mapping
from typing import Any

from moebius_kernels.rotary import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RotarySpec,
    YarnScaling,
    yarn_magnitude,
)
from moebius_worker.checkpoint.errors import CheckpointError


def rope_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config says, wherever it does."""
    return {
        "rope_theta": config.get("rope_theta"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
        **(config.get("rope_scaling") or {}),
        **(config.get("rope_parameters") or {}),
    }


def read_rope(config: Mapping[str, Any], head_dim: int, default_theta: float) -> RotarySpec:
    """Raises CheckpointError for a type of scaling that is not implemented and for missing parameters."""
    parameters = rope_parameters(config)
    partial = parameters["partial_rotary_factor"]
    partial = 1.0 if partial is None else partial
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"The config says partial_rotary_factor = {partial!r}: of {head_dim} numbers of a head that is "
            f"{rotary_dim}, but an even number of them must turn."
        )
    theta = parameters["rope_theta"] or default_theta
    kind = _kind(parameters)
    # Checkpoints differ in where they say it, and some leave out that it is their whole context.
    original = int(
        config.get("original_max_position_embeddings")
        or parameters.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )

    def number(key: str) -> float:
        value = parameters.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(
                f"The config's rope scaling {kind!r} says {key} = {value!r}; a number is needed."
            )
        return float(value)

    match kind:
        case "default":
            return RotarySpec(rotary_dim, theta)
        case "linear":
            return RotarySpec(rotary_dim, theta, LinearScaling(number("factor")))
        case "llama3":
            scaling = Llama3Scaling(
                number("factor"), number("low_freq_factor"), number("high_freq_factor"), original
            )
            return RotarySpec(rotary_dim, theta, scaling)
        case "proportional":
            return RotarySpec(head_dim, theta, ProportionalScaling(partial, parameters.get("factor") or 1.0))
        case "yarn":
            factor = number("factor")
            return RotarySpec(
                rotary_dim,
                theta,
                YarnScaling(
                    factor=factor,
                    original_max_position_embeddings=original,
                    attention_factor=_yarn_attention_factor(parameters, factor),
                    beta_fast=float(parameters.get("beta_fast") or 32),
                    beta_slow=float(parameters.get("beta_slow") or 1),
                    truncate=bool(parameters.get("truncate", True)),
                ),
            )
    raise CheckpointError(
        f"The config asks for rope scaling {kind!r}; implemented are default, linear, llama3, "
        "proportional and yarn."
    )


def yarn_context(config: Mapping[str, Any]) -> int:
    """How many positions YaRN makes of those that a model was trained for; 0 if the config does not say.

    Who adds YaRN to a config, as the pages of models tell people to, need not change
    `max_position_embeddings` too.
    """
    parameters = rope_parameters(config)
    original = parameters.get("original_max_position_embeddings")
    if original is None or _kind(parameters) != "yarn":
        return 0
    return int(original * parameters["factor"])


def _kind(parameters: Mapping[str, Any]) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    above, below = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if above and below:
        return yarn_magnitude(factor, above) / yarn_magnitude(factor, below)
    return yarn_magnitude(factor)
