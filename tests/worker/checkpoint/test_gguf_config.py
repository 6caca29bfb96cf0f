"""Configs made of GGUF metadata: equal to the Hugging Face ones they came from, or refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.config import gguf_config, gguf_generation_config
from moebius_worker.checkpoint.gguf.families import FAMILIES as TABLES
from moebius_worker.checkpoint.gguf.file import Gguf, read_gguf
from tests.tiny import write_checkpoint
from tests.worker.checkpoint.gguf_files import write_gguf, write_llama_gguf
from tests.worker.checkpoint.gguf_models import FAMILIES, converted, original_config

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


# What GGUF does not say: how the file was written, what training used, and defaults of what is not used.
UNTOLD = {
    *("dtype", "transformers_version", "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("mtp_num_hidden_layers", "full_attention_interval", "vocab_size_per_layer_input"),
}


def told(config: Any) -> dict[str, Any]:
    """A config of transformers with what follows written out, and without what GGUF does not say."""
    values = {key: value for key, value in config.to_dict().items() if key not in UNTOLD}
    if values.get("head_dim") is None:
        values["head_dim"] = config.hidden_size // config.num_attention_heads
    values["rope_parameters"].pop("type", None)  # rope_type, as it was called
    return values


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_every_family_is_the_one_that_llama_cpp_converted(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    config, original = gguf_config(read_gguf(converted(family, tmp_path))), original_config(family)
    assert config["architectures"] == original["architectures"]
    assert config["model_type"] == original["model_type"]
    expected = told(AutoConfig.for_model(**original))
    made = told(AutoConfig.for_model(**config))
    if family.startswith("deepseek_v2"):
        expected |= {"scoring_func": "softmax"}
    if family == "minimax_m2":
        expected |= {"use_qk_norm": True}
    if family in ("glm4_moe", "deepseek_v3"):
        expected |= {"num_nextn_predict_layers": 0}
    assert made == expected


def test_every_family_is_tested() -> None:
    told_families = {original_config(family)["architectures"][0] for family in FAMILIES}
    assert told_families == {family.class_name for family in TABLES}


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
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported.* deepseek2, gemma4,"):
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


def changed(family: str, tmp_path: Path, change: dict[str, Any]) -> dict[str, Any]:
    """The config of a family's file with other metadata; None takes a key away."""
    gguf = read_gguf(converted(family, tmp_path))
    metadata = {key: value for key, value in (gguf.metadata | change).items() if value is not None}
    return gguf_config(Gguf(gguf.path, metadata, gguf.tensors))


def test_layers_that_draft_tokens_are_none_of_the_models_own(tmp_path: Path) -> None:
    change = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    change["qwen35.attention.recurrent_layers"] = [True, True, True, False, False]
    config = changed("qwen3_5", tmp_path, change)
    assert config["num_hidden_layers"] == 4
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]


def test_which_layers_are_recurrent_follows_from_the_interval_too(tmp_path: Path) -> None:
    change = {"qwen35.attention.recurrent_layers": None}
    assert changed("qwen3_5", tmp_path, change)["layer_types"] == original_config("qwen3_5")["layer_types"]
    change |= {"qwen35.full_attention_interval": 2}
    layer_types = changed("qwen3_5", tmp_path, change)["layer_types"]
    assert layer_types == ["linear_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("pattern", "expected"), [(None, "sf"), (2, "sf"), (1, "ff"), ([True, True], "ss"), ([False, True], "fs")]
)
def test_the_windows_of_gpt_oss_may_be_a_number_or_a_list(
    tmp_path: Path, pattern: Any, expected: str
) -> None:
    config = changed("gpt_oss", tmp_path, {"gpt-oss.attention.sliding_window_pattern": pattern})
    assert [kind[0] for kind in config["layer_types"]] == list(expected)


@pytest.mark.parametrize("heads", [[2, 1], [2, 2], 2])
def test_the_kv_heads_of_gemma_4_may_be_a_number_or_a_list(tmp_path: Path, heads: Any) -> None:
    config = changed("gemma4_moe", tmp_path, {"gemma4.attention.head_count_kv": heads})
    sliding, full = heads if isinstance(heads, list) else (heads, heads)
    assert (config["num_key_value_heads"], config["num_global_key_value_heads"]) == (sliding, full)


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        (
            "gemma4_ple",
            {"gemma4.attention.head_count_kv": [2, 2, 1, 2]},
            "differs between layers of one",
        ),
        ("gemma4_ple", {"gemma4.feed_forward_length": [48, 96, 96, 96]}, r"feed_forward_length = \[48, 96"),
        ("gemma4_ple", {"gemma4.attention.sliding_window_pattern": [True]}, "has 1 values for 4 layers"),
        ("gemma4_moe", {"gemma4.attention.sliding_window_pattern": None}, "lacks .*sliding_window_pattern"),
        ("qwen3_moe", {"qwen3moe.attention.head_count": [4, 8]}, "head_count differs between layers"),
        ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func = 2"),
        ("glm4_moe", {"glm4moe.expert_gating_func": 1}, "expert_gating_func = 1"),
        ("glm4_moe", {"glm4moe.rope.dimension_sections": [8, 12, 12, 0]}, "rope.dimension_sections"),
        ("deepseek_v3", {"deepseek2.attention.head_count_kv": 3}, "head_count_kv = 3"),
        ("olmoe", {"olmoe.attention.clamp_kqv": 8.0}, "clamp_kqv = 8.0"),
        ("qwen3_5", {"qwen35.nextn_predict_layers": 4}, "has 0 layers"),
    ],
)
def test_what_a_family_cannot_be_is_refused_by_name(
    tmp_path: Path, family: str, change: dict, named: str
) -> None:
    with pytest.raises(CheckpointError, match=named) as error:
        changed(family, tmp_path, change)
    assert f"{family}.gguf" in str(error.value)


def test_older_files_of_deepseek_have_the_sizes_of_whole_heads(tmp_path: Path) -> None:
    change = {f"deepseek2.attention.{kind}_length_mla": None for kind in ("key", "value")}
    change |= {"deepseek2.attention.key_length": 24, "deepseek2.attention.value_length": 12}
    config = changed("deepseek_v3", tmp_path, change | {"deepseek2.attention.head_count_kv": 4})
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_key_value_heads")
    assert [config[size] for size in sizes] == [16, 8, 12, 4]


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
