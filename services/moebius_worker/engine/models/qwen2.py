"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from moebius_worker.engine.models.config import read_decoder_config
from moebius_worker.engine.models.llama import DenseDecoder
from moebius_worker.engine.models.parameters import Place


def without_window(config: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's configs name a window though no model uses it: `use_sliding_window` = True is refused."""
    return {**config, "sliding_window": None}


class Qwen2ForCausalLM(DenseDecoder):
    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        sizes = read_decoder_config(without_window(config), default_theta=10_000.0)
        super().__init__(sizes, place, qkv_bias=True, output_bias=False)
