"""Which class computes which architecture."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.llama import LlamaForCausalLM, MistralForCausalLM
from moebius_worker.engine.models.mixtral import MixtralForCausalLM
from moebius_worker.engine.models.olmoe import OlmoeForCausalLM
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.qwen2 import Qwen2ForCausalLM
from moebius_worker.engine.models.qwen3 import Qwen3ForCausalLM
from moebius_worker.engine.models.qwen3_moe import Qwen3MoeForCausalLM

ARCHITECTURES = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "MixtralForCausalLM": MixtralForCausalLM,
        "OlmoeForCausalLM": OlmoeForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
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
    """The model of a config whose parameters have no memory yet. Raises CheckpointError."""
    return ARCHITECTURES[architecture_of(config)](config, place)
