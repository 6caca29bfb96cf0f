"""Qwen3: Llama with a norm on each head of queries and keys."""

from collections.abc import Mapping
from typing import Any

from moebius_worker.engine.models.config import read_decoder_config
from moebius_worker.engine.models.llama import DenseDecoder
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.qwen2 import without_window


class Qwen3ForCausalLM(DenseDecoder):
    def __init__(self, config: Mapping[str, Any], place: Place) -> None:
        sizes = read_decoder_config(without_window(config), default_theta=10_000.0)
        super().__init__(sizes, place, qk_norm="head")
