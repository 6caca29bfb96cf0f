"""Configs made of GGUF metadata: equal to the Hugging Face ones they came from, or refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.config import gguf_config, gguf_generation_config
from moebius_worker.checkpoint.gguf.file import read_gguf
from tests.tiny import write_checkpoint
from tests.worker.checkpoint.gguf_files import write_gguf, write_llama_gguf

DENSE = {
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}
TENSORS = {"token_embd.weight": np.ones((32, 64), dtype=np.float32)}


def config_of(tmp_path: Path, extra: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> dict:
    metadata = {key: value for key, value in (DENSE | extra).items() if value is not None}
    return gguf_config(read_gguf(write_gguf(tmp_path / "m.gguf", metadata, TENSORS | (tensors or {}))))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_config_is_that_of_the_checkpoint_it_was_made_from(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    source = write_checkpoint(tmp_path / "hf", family, rms_norm_eps=1e-5)
    config = gguf_config(read_gguf(write_llama_gguf(tmp_path / "m.gguf", source)))
    original = AutoConfig.from_pretrained(source)
    made = type(original)(**{key: value for key, value in config.items() if key != "model_type"})
    differing = {
        key: (value, original.to_dict()[key])
        for key, value in made.to_dict().items()
        if value != original.to_dict()[key]
    }
    # GGUF does not say these: the head dimension where it follows, nor how the file was written.
    for key in ("head_dim", "dtype", "transformers_version", "_name_or_path"):
        differing.pop(key, None)
    assert differing == {}
    assert config["architectures"] == original.architectures
    assert config["model_type"] == original.model_type
    assert config["head_dim"] == 16


def test_missing_keys_take_llama_cpps_defaults(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None})
    assert config["num_key_value_heads"] == 4
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config["tie_word_embeddings"] is True


def test_the_vocabulary_is_as_large_as_the_embedding(tmp_path: Path) -> None:
    assert config_of(tmp_path, {"llama.vocab_size": 31})["vocab_size"] == 32


def test_a_list_with_one_value_a_layer_counts_as_that_value(tmp_path: Path) -> None:
    lists = {"llama.attention.head_count": [4, 4], "llama.feed_forward_length": [96, 96]}
    config = config_of(tmp_path, lists)
    assert (config["num_attention_heads"], config["intermediate_size"]) == (4, 96)
    with pytest.raises(CheckpointError, match=r"llama\.attention\.head_count_kv differs between layers"):
        config_of(tmp_path, {"llama.attention.head_count_kv": [4, 2]})


def test_no_experts_means_dense(tmp_path: Path) -> None:
    assert config_of(tmp_path, {"llama.expert_count": 0})["model_type"] == "llama"


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8"),
        ({"llama.attention.value_length": 8}, "llama.attention.value_length = 8"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type = 'longrope'"),
        (
            {"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_gating_func": 2},
            "gating_func",
        ),
        ({"llama.expert_count": 4}, "llama.expert_used_count"),
        ({"llama.embedding_length": None}, "lacks the metadata key llama.embedding_length"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path: Path, extra: dict, named: str) -> None:
    with pytest.raises(CheckpointError) as error:
        config_of(tmp_path, extra)
    assert named in str(error.value)
    assert "m.gguf" in str(error.value)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, TENSORS, architecture="mamba")
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported.* deepseek2, .*gemma4,"):
        gguf_config(read_gguf(path))


@pytest.mark.parametrize(
    ("extra", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, {"rope_type": "default"}),
        ({"llama.rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 16.0,
                "llama.rope.scaling.original_context_length": 4096,
            },
            {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.attn_factor": 1.25,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_keys(tmp_path: Path, extra: dict, scaling: dict) -> None:
    assert config_of(tmp_path, extra)["rope_parameters"] == {"rope_theta": 500000.0, **scaling}


def llama3_divisors(factor: float, low_freq_factor: float = 1.0) -> tuple[np.ndarray, dict[str, Any]]:
    """What llama.cpp stores: plain frequencies over Llama 3's, which transformers computes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    parameters = {"rope_theta": 500000.0, **rope}
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, rope_parameters=parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    return (plain / scaled.numpy()).astype(np.float32), rope


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_rope_scaling_is_found_from_the_stored_divisors(tmp_path: Path, factor: float) -> None:
    divisors, rope = llama3_divisors(factor)
    config = config_of(
        tmp_path,
        {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 1},
        {"rope_freqs.weight": divisors},
    )
    assert config["rope_parameters"].pop("factor") == pytest.approx(factor, rel=1e-5)
    rope.pop("factor")
    assert config["rope_parameters"] == {"rope_theta": 500000.0, **rope}


def test_divisors_of_another_scaling_are_refused(tmp_path: Path) -> None:
    divisors, _ = llama3_divisors(8.0, low_freq_factor=2.0)
    one_head = {"llama.attention.head_count": 1, "llama.attention.head_count_kv": 1}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        config_of(tmp_path, one_head, {"rope_freqs.weight": divisors})
    ones = {"rope_freqs.weight": np.ones(32, dtype=np.float32)}
    assert config_of(tmp_path, one_head, ones)["rope_parameters"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|end_of_text|>", "a", "<|eot_id|>", "<|im_end|>"], [0, 2, 3]),
        (["<|endoftext|>", "<|user|>", "<|observation|>", "[gMASK]"], [0, 1, 2]),
        (["<eos>", "<|user|>", "<turn|>", "<|tool_response>"], [0, 2, 3]),
        (["<|endoftext|>", "<|end|>"], [0, 1]),
        # One of a turn's messages ends, not the turn.
        (["<|endoftext|>", "<|end|>", "<|call|>", "<|return|>"], [0, 2, 3]),
    ],
)
def test_the_generation_config_ends_with_every_token_that_ends_a_turn(
    tmp_path: Path, tokens: list[str], ends: list[int]
) -> None:
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
    }
    gguf = read_gguf(write_gguf(tmp_path / "m.gguf", metadata, TENSORS))
    assert gguf_generation_config(gguf) == {"bos_token_id": 1, "eos_token_id": ends}
    eot = read_gguf(write_gguf(tmp_path / "e.gguf", metadata | {"tokenizer.ggml.eot_token_id": 1}, TENSORS))
    assert 1 in gguf_generation_config(eot)["eos_token_id"]
    more = read_gguf(
        write_gguf(tmp_path / "i.gguf", metadata | {"tokenizer.ggml.eos_token_ids": [1]}, TENSORS)
    )
    assert 1 in gguf_generation_config(more)["eos_token_id"]
