"""Configs as published, at full size, without memory: parameters and context are those of the model cards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
META = Place(torch.device("meta"), torch.bfloat16)
# Of the text alone, in billions, and the context.
PUBLISHED = {
    "DeepSeek-V2-Lite": (15.7, 163840),
    "DeepSeek-V3": (671.0, 163840),
    "GLM-4.6": (352.8, 202752),
    "MiniMax-M2": (228.7, 196608),
    "Mixtral-8x7B": (46.7, 32768),
    "OLMoE-1B-7B-0924": (6.92, 4096),
    "Qwen3-30B-A3B": (30.5, 40960),
    "Qwen3-Next-80B-A3B": (79.7, 262144),
    "Qwen3.5-35B-A3B": (34.7, 262144),
    "gemma-3-4b-it": (3.88, 131072),
    "gemma-4-26B-A4B-it": (25.2, 262144),
    "gemma-4-31B-it": (30.7, 262144),
    "gpt-oss-20b": (20.9, 131072),
}


def published(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return config | changes


def test_every_config_is_expected() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_context_are_those_of_the_model_card(name: str) -> None:
    parameters, context = PUBLISHED[name]
    model = build_model(published(name), META)
    counted = sum(torch.Size(slot.shape).numel() for slot in model.slots().values()) / 1e9
    assert float(f"{counted:.3g}" if parameters < 100 else f"{counted:.1f}") == parameters
    assert model.config.max_position_embeddings == context


def test_yarn_that_a_user_adds_makes_the_context_longer() -> None:
    """As Qwen's pages tell: `max_position_embeddings` stays as it was."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = build_model(published("Qwen3-30B-A3B", rope_scaling=yarn), META)
    assert model.config.max_position_embeddings == 131072
