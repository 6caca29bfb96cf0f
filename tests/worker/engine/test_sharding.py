"""Every parameter declares how ranks divide it, and what two ranks have adds up to the whole model."""

import re
from collections.abc import Mapping

import pytest
import torch
from transformers import Qwen4ExpTextConfig

from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.engine.models.decoder import Decoder
from moebius_worker.engine.models.parameters import WHOLE, Rank, Shard, Slot
from moebius_worker.engine.models.registry import ARCHITECTURES, build_model
from moebius_worker.engine.weights.load import Loading, plan_loading
from moebius_worker.engine.weights.schemes.declared import DeclaredScheme
from tests.worker.checkpoint.gguf_models import FAMILIES, original_config
from tests.worker.engine.models.test_qwen4_exp import FLASH as QWEN_FLASH
from tests.worker.engine.test_published_configs import META, PUBLISHED, published
from tests.worker.engine.test_published_quantisation import four_layers

# The first that is found in a name says how it is divided. What each head, or all of them, need whole is not.
EXPECTED = (
    (r"\.experts\.\d+\.", Shard.EXPERT),
    # Norms over all heads together are over what is divided.
    (r"full:.*\.self_attn\.[qk]_norm", Shard.COLUMN),
    (r"norm|\.(gate|router|proj|shared_expert_gate)\.(weight|bias)$|e_score|scale|scalar", Shard.NONE),
    (
        r"linear_attn|hyper_connection|\.ple\.|indexer|embed_tokens|per_layer|kv_a_proj|q_a_proj|o_proj\.bias",
        Shard.NONE,
    ),
    (r"self_attn\.(q_b?|k|v|kv_b)_?proj|sinks|lm_head|(gate|up)_proj", Shard.COLUMN),
    (r"(o|down)_proj\.weight", Shard.ROW),
)
FLASH = Qwen4ExpTextConfig(**(QWEN_FLASH | {"num_experts": 6})).to_dict()
CONFIGS = (
    {name: four_layers(published(name)) for name in PUBLISHED}
    | {family: original_config(family) for family in FAMILIES}
    | {"qwen4_exp": FLASH | {"architectures": ["Qwen4ExpForCausalLM"]}}
)
FULL_NORMS = ("MiniMaxM2ForCausalLM", "OlmoeForCausalLM")


class Reader:
    """Of names alone."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self.tensors = {
            name: TensorInfo(slot.shape, "BF16", "file", torch.Size(slot.shape).numel() * 2)
            for name, slot in slots.items()
        }

    def read(self, name: str) -> torch.Tensor:
        raise NotImplementedError(name)


def loading_of(model: Decoder) -> Loading:
    slots, scheme = model.slots(), DeclaredScheme("none", lambda module: None)
    return plan_loading(Reader(slots), scheme, slots, model.ignores, dtype=torch.bfloat16, expand=False)


def sizes(model: Decoder, loading: Loading, rank: Rank) -> dict[int, int]:
    loading.allocate(META, rank)
    owners = {id(slot.owner): slot.owner for slot in model.slots().values()}
    return {key: sum(tensor.numel() for tensor in owner.tensors) for key, owner in owners.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_parameter_is_divided_as_it_must_be(name: str) -> None:
    for parameter, slot in build_model(CONFIGS[name], META).slots().items():
        told = f"full:{parameter}" if CONFIGS[name]["architectures"][0] in FULL_NORMS else parameter
        expected = [shard for pattern, shard in EXPECTED if re.search(pattern, told)]
        assert expected, f"{parameter} is new"
        assert slot.owner.shard is expected[0], parameter


@pytest.mark.parametrize("name", CONFIGS)
def test_what_two_ranks_have_adds_up(name: str) -> None:
    model = build_model(CONFIGS[name], META)
    loading = loading_of(model)
    whole = sizes(model, loading, WHOLE)
    ranks = [sizes(model, loading, Rank(index, 2)) for index in range(2)]
    for slot in model.slots().values():
        key = id(slot.owner)
        first, second = (rank[key] for rank in ranks)
        assert first == second
        assert first + second == whole[key] * (2 if slot.owner.shard is Shard.NONE else 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_whole_experts(name: str) -> None:
    """And are what a token goes to a part of."""
    model = build_model(CONFIGS[name], META)
    owners = {slot.owner for slot in model.slots().values()}
    experts = {owner for owner in owners if owner.shard is Shard.EXPERT}
    assert bool(experts) is (model.expert_share < 1)
    assert experts == {owner for owner in owners if owner.experts is not None}


def test_every_class_is_here() -> None:
    # Another name of Llama's parts.
    built = {ARCHITECTURES["MistralForCausalLM"], ARCHITECTURES["Mistral3ForConditionalGeneration"]}
    built |= {ARCHITECTURES[config["architectures"][0]] for config in CONFIGS.values()}
    assert built == set(ARCHITECTURES.values())
