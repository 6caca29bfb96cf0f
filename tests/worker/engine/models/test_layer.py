"""Binding a model changes the operations of every layer in it, and of no other model."""

from dataclasses import fields, replace

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Gemma4TextConfig,
    GptOssConfig,
    MiniMaxM2Config,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
)

from moebius_kernels.operations import REFERENCE, Operations
from moebius_worker.engine.models.layer import Layer, asks_host, layers_in
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model

CONFIGS = {
    "DeepseekV3ForCausalLM": (DeepseekV3Config, {"n_routed_experts": 8, "num_experts_per_tok": 2}),
    "Gemma4ForCausalLM": (
        Gemma4TextConfig,
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
    ),
    "GptOssForCausalLM": (GptOssConfig, {}),
    "MiniMaxM2ForCausalLM": (MiniMaxM2Config, {}),
    "Qwen3_5MoeForCausalLM": (Qwen3_5MoeTextConfig, {}),
    "Qwen3MoeForCausalLM": (Qwen3MoeConfig, {"num_experts": 8, "num_experts_per_tok": 2}),
}


def model(architecture):
    config_class, settings = CONFIGS[architecture]
    config = config_class(num_hidden_layers=4, **settings).to_dict()
    return build_model(config | {"architectures": [architecture]}, Place(torch.device("cpu"), torch.float32))


def all_layers(layer: Layer) -> list[Layer]:
    found = [layer]
    for child in layers_in(vars(layer).values()):
        found += all_layers(child)
    return found


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_layer_is_bound(architecture):
    bound, other = model(architecture), model(architecture)
    assert len(all_layers(bound)) > 30
    ops = replace(REFERENCE, rms_norm=lambda *_, **__: torch.zeros(()))
    bound.bind(ops)
    assert all(layer.ops is ops for layer in all_layers(bound))
    assert all(layer.ops is REFERENCE for layer in all_layers(other))


def test_no_model_calls_an_operation_but_through_its_binding():
    """Otherwise a plan would not reach it. The table of n-grams is in the host's memory, where none does."""
    import ast
    from pathlib import Path

    import moebius_worker.engine.models as package

    names = {field.name for field in fields(Operations)}
    direct = []
    for file in Path(package.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
                direct.append((file.name, node.func.id))
    assert direct == [("ngram_embedding.py", "embedding")]


def test_a_layer_asks_the_host_if_one_of_its_layers_does():
    class Asking(Layer):
        ASKS_HOST = True

    class Whole(Layer):
        def __init__(self, *parts):
            self.parts = {"some": [*parts]}

    assert not asks_host(Whole(Layer(), Whole()))
    assert asks_host(Whole(Layer(), Whole(Asking())))
