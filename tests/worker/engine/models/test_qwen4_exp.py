"""Qwen3.8-Flash-Next (qwen4_exp) against transformers."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.qwen3_5 import linear_layers
from moebius_worker.engine.models.registry import build_model
from tests.worker.engine.models.harness import (
    Texts,
    check_bf16,
    check_chunks,
    check_family,
    check_one_piece,
    load,
    write_random,
)
from tests.worker.engine.models.qwen_world import EXPERTS, SCALES, SIZES, VISION

FLASH = (
    SIZES
    | EXPERTS
    | {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "hc_count": 3,
        "hc_lowrank": 10,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 24,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 8,
        # The last part of the second table is smaller than the others.
        "split_ngram_parts": 5,
        # Of up to 30 blocks 4 are selected. There are so many heads that no block scores 0 with all of them:
        # of such blocks transformers selects those that its sort happens to leave in front.
        "indexer_n_heads": 12,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 20,
        "indexer_budget": 12,
        "indexer_compress_ratio": 3,
        "eos_token_id": 2,
    }
)
CASES = {
    "gate of the linear layers": {"output_gate_type": "sigmoid"},
    "no n-grams": {"ple_layer_ids": None},
    "longer n-grams": {"ngram_size": 4, "ple_conv_kernel_size": 3},
    "weights as they are": {"norm_topk_prob": False},
}


def flash(path, **config):
    model = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**(FLASH | config)))
    return write_random(path, model, scales=SCALES), model


def test_family(tmp_path):
    check_family(*flash(tmp_path))


def test_bf16(tmp_path):
    check_bf16(*flash(tmp_path))


@pytest.mark.parametrize("case", CASES)
def test_variants(tmp_path, case):
    path, model = flash(tmp_path, **CASES[case])
    check_chunks(load(path), model.eval())


@pytest.mark.parametrize("name", ["full_attention", "indexed_attention", "qwen_sparse_attention"])
def test_each_name_that_configs_have_for_the_other_layers(name):
    """The published configs', and what transformers 5.24 and 5.17 make of that when they save a model."""
    config = {"num_hidden_layers": 2, "layer_types": ["linear_attention", name]}
    assert linear_layers(config, 2) == [True, False]


def test_multimodal_checkpoint_is_served_text_only(tmp_path):
    config = Qwen4ExpConfig(text_config=FLASH, vision_config=VISION)
    model = Qwen4ExpForConditionalGeneration(config)
    path = write_random(tmp_path, model, scales=SCALES)
    assert any(name.startswith("model.visual.") for name in load_file(path / "model.safetensors"))
    check_chunks(load(path), model.eval())


def test_ngrams_do_not_reach_back_over_an_end(tmp_path):
    path, model = flash(tmp_path)
    runner, model = load(path), model.eval()
    texts = Texts(runner, model, [])
    texts.add([2, 7, 8, 2, 2, 9, 2, 10, 11, 12, 2, 5])
    for count in (1, 3, 1, 1, 4, 2):
        assert texts.step({0: count}) < 1e-4


def test_the_table_of_ngrams_stays_as_it_is_stored(tmp_path):
    path, model = flash(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tables = {name: tensor.half() for name, tensor in tensors.items() if ".ngram_embedding." in name}
    save_file(tensors | tables, path / "model.safetensors")
    runner = load(path)
    stored = [layer.ngrams.table.table for layer in runner._model.layers if layer.ngrams]
    assert {block.parts["data"].dtype for table in stored for block in table.blocks} == {torch.float16}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".ngram_embedding." in name:
                parameter.copy_(parameter.half())
    check_one_piece(runner, model.eval())


def test_numbers_of_the_hash_are_computed_if_the_checkpoint_has_none(tmp_path):
    path, model = flash(tmp_path)
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert len(tensors) - len(kept) == 6
    save_file(kept, path / "model.safetensors")
    check_one_piece(load(path), model.eval())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"indexer_kv_heads": 2}, "indexer_kv_heads"),
        ({"indexer_budget": 13}, "indexer_budget"),
        ({"indexer_head_dim": 8}, "indexer_head_dim"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"ple_embed_dim": 26}, "ple_embed_dim"),
        ({"ple_layer_ids": [9]}, "ple_layer_ids"),
        ({"output_gate_type": "gelu"}, "output_gate_type"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ],
)
def test_configs_that_make_no_sense_are_refused_by_name(change, named):
    config = FLASH | {"architectures": ["Qwen4ExpForCausalLM"], **change}
    with pytest.raises(CheckpointError, match=named):
        build_model(config, Place(torch.device("meta"), torch.float32))
