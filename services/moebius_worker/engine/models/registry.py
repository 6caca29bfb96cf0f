"""Which class computes which architecture."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.layers import Place
from moebius_worker.engine.models.llama import LlamaForCausalLM, MistralForCausalLM
from moebius_worker.engine.models.mixtral import MixtralForCausalLM

ARCHITECTURES = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "MixtralForCausalLM": MixtralForCausalLM,
    }
)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of the config's architectures that is known. Raises CheckpointError with those that are."""
    declared = list(config.get("architectures") or [])
    for name in declared:
        if name in ARCHITECTURES:
            return name
    raise CheckpointError(
        f"The architecture {', '.join(declared) or '(none given)'} is not supported. "
        f"Supported are {', '.join(ARCHITECTURES)}."
    )


def build_model(config: Mapping[str, Any], place: Place) -> Decoder:
    """The model of a config with parameters that are not filled yet. Raises CheckpointError."""
    return ARCHITECTURES[architecture_of(config)](config, place)
