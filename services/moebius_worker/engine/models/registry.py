"""Which class computes which architecture."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moebius_worker.checkpoint.errors import CheckpointError, understanding
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from moebius_worker.engine.models.gemma3 import Gemma3ForCausalLM
from moebius_worker.engine.models.gemma4 import Gemma4ForCausalLM
from moebius_worker.engine.models.glm4_moe import Glm4MoeForCausalLM, Glm4MoeLiteForCausalLM
from moebius_worker.engine.models.gpt_oss import GptOssForCausalLM
from moebius_worker.engine.models.llama import (
    LlamaForCausalLM,
    Ministral3ForCausalLM,
    Mistral3ForConditionalGeneration,
    MistralForCausalLM,
)
from moebius_worker.engine.models.minimax_m2 import MiniMaxM2ForCausalLM
from moebius_worker.engine.models.mixtral import MixtralForCausalLM
from moebius_worker.engine.models.olmoe import OlmoeForCausalLM
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.qwen2 import Qwen2ForCausalLM
from moebius_worker.engine.models.qwen3 import Qwen3ForCausalLM
from moebius_worker.engine.models.qwen3_5 import Qwen35ForCausalLM, Qwen35MoeForCausalLM
from moebius_worker.engine.models.qwen3_moe import Qwen3MoeForCausalLM
from moebius_worker.engine.models.qwen3_next import Qwen3NextForCausalLM
from moebius_worker.engine.models.qwen4_exp import Qwen4ExpForCausalLM

ARCHITECTURES = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
        "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
        "Gemma3ForCausalLM": Gemma3ForCausalLM,
        "Gemma3ForConditionalGeneration": Gemma3ForCausalLM,
        "Gemma4ForCausalLM": Gemma4ForCausalLM,
        "Gemma4ForConditionalGeneration": Gemma4ForCausalLM,
        "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
        "Glm4MoeLiteForCausalLM": Glm4MoeLiteForCausalLM,
        "GptOssForCausalLM": GptOssForCausalLM,
        "LlamaForCausalLM": LlamaForCausalLM,
        "MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM,
        "Ministral3ForCausalLM": Ministral3ForCausalLM,
        "Mistral3ForConditionalGeneration": Mistral3ForConditionalGeneration,
        "MistralForCausalLM": MistralForCausalLM,
        "MixtralForCausalLM": MixtralForCausalLM,
        "OlmoeForCausalLM": OlmoeForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
        "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
        "Qwen3_5ForCausalLM": Qwen35ForCausalLM,
        "Qwen3_5ForConditionalGeneration": Qwen35ForCausalLM,
        "Qwen3_5MoeForCausalLM": Qwen35MoeForCausalLM,
        "Qwen3_5MoeForConditionalGeneration": Qwen35MoeForCausalLM,
        "Qwen4ExpForCausalLM": Qwen4ExpForCausalLM,
        "Qwen4ExpForConditionalGeneration": Qwen4ExpForCausalLM,
    }
)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of the config's architectures that is known. Raises CheckpointError with those that are."""
    declared = config.get("architectures") or []
    declared = [str(name) for name in (declared if isinstance(declared, list) else [declared])]
    for name in declared:
        if name in ARCHITECTURES:
            return name
    raise CheckpointError(
        f"The architecture {', '.join(declared) or '(none given)'} is not supported. "
        f"Supported are {', '.join(ARCHITECTURES)}."
    )


def build_model(config: Mapping[str, Any], place: Place) -> Decoder:
    """The model of a config whose parameters have no memory yet. Raises CheckpointError."""
    architecture = architecture_of(config)
    with understanding(f"The config of this {architecture}"):
        return ARCHITECTURES[architecture](config, place)
