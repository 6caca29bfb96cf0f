"""Ministral 3 and Mistral Small 3.1 against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Ministral3Config,
    Ministral3ForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
)

from tests.worker.engine.models.harness import (
    TOLERANCE,
    Texts,
    check_bf16,
    check_chunks,
    check_family,
    load,
    write_random,
)

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "sliding_window": None,
}
# Short enough for the temperature to rise within the texts.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
SCALES = {"q_proj": 0.3, "k_proj": 0.3}


def made(tmp_path: Path) -> tuple[Path, torch.nn.Module]:
    model = Ministral3ForCausalLM(Ministral3Config(**SIZES, rope_parameters=ROPE))
    return write_random(tmp_path, model, scales=SCALES), model


def test_logits_and_greedy_text_are_those_of_transformers(tmp_path: Path) -> None:
    check_family(*made(tmp_path))


def test_bf16_is_as_exact_as_in_transformers(tmp_path: Path) -> None:
    check_bf16(*made(tmp_path))


def test_the_temperature_shows_in_the_logits(tmp_path: Path) -> None:
    path, model = made(tmp_path)
    model.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    texts = Texts(load(path), model.eval(), [37])
    assert texts.step({0: 16}) < TOLERANCE
    assert texts.step({0: 21}) > 10 * TOLERANCE


@pytest.mark.parametrize("kind", ["ministral", "mistral small"])
def test_a_multimodal_checkpoint_is_served_for_its_text(tmp_path: Path, kind: str) -> None:
    text: Any = (
        Ministral3Config(**SIZES, rope_parameters=ROPE) if kind == "ministral" else MistralConfig(**SIZES)
    )
    vision = PixtralVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = Mistral3ForConditionalGeneration(config).eval()
    check_chunks(load(write_random(tmp_path, model, scales=SCALES)), model)
