"""Which class computes which architecture."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.deepseek_v3 import DeepseekV3ForCausalLM
from moebius_worker.engine.models.gemma4 import Gemma4ForCausalLM
from moebius_worker.engine.models.glm4_moe import Glm4MoeForCausalLM
from moebius_worker.engine.models.gpt_oss import GptOssForCausalLM
from moebius_worker.engine.models.llama import LlamaForCausalLM, MistralForCausalLM
from moebius_worker.engine.models.minimax_m2 import MiniMaxM2ForCausalLM
from moebius_worker.engine.models.mixtral import MixtralForCausalLM
from moebius_worker.engine.models.olmoe import OlmoeForCausalLM
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.qwen2 import Qwen2ForCausalLM
from moebius_worker.engine.models.qwen3 import Qwen3ForCausalLM
from moebius_worker.engine.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from moebius_worker.engine.models.qwen3_moe import Qwen3MoeForCausalLM
from moebius_worker.engine.models.qwen3_next import Qwen3NextForCausalLM

ARCHITECTURES = MappingProxyType(
    {
        "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
        "Gemma4ForCausalLM": Gemma4ForCausalLM,
        "Gemma4ForConditionalGeneration": Gemma4ForCausalLM,
        "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
        "GptOssForCausalLM": GptOssForCausalLM,
        "LlamaForCausalLM": LlamaForCausalLM,
        "MiniMaxM2ForCausalLM": MiniMaxM2ForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "MixtralForCausalLM": MixtralForCausalLM,
        "OlmoeForCausalLM": OlmoeForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
        "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
        "Qwen3_5ForCausalLM": Qwen3_5ForCausalLM,
        "Qwen3_5ForConditionalGeneration": Qwen3_5ForCausalLM,
        "Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM,
        "Qwen3_5MoeForConditionalGeneration": Qwen3_5MoeForCausalLM,
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
