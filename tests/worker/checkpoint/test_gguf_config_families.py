"""Configs of every family, of the files that llama.cpp's converter made and of others like them."""

from pathlib import Path
from typing import Any

import pytest

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.config import gguf_config
from moebius_worker.checkpoint.gguf.families import FAMILIES as TABLES
from moebius_worker.checkpoint.gguf.file import Gguf, read_gguf
from tests.worker.checkpoint.gguf_models import FAMILIES, converted, original_config

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


# Told as another family, which computes the same.
TOLD_AS = {
    "qwen3_next": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "glm4_moe_lite": ("DeepseekV3ForCausalLM", "deepseek_v3"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_of_every_family_is_the_one_that_llama_cpp_converted(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    config, original = gguf_config(read_gguf(converted(family, tmp_path))), original_config(family)
    if family in TOLD_AS:
        class_name, model_type = TOLD_AS[family]
        original |= {"architectures": [class_name], "model_type": model_type}
    assert config["architectures"] == original["architectures"]
    assert config["model_type"] == original["model_type"]
    made, expected = told(AutoConfig.for_model(**config)), told(AutoConfig.for_model(**original))
    # What transformers does not read, but others do, and MTP, of which the file has nothing.
    for key in ("scoring_func", "topk_method", "use_qk_norm"):
        if key in config and key not in original:
            made.pop(key)
    expected |= {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in expected else {}
    if family in TOLD_AS:
        expected = {key: value for key, value in expected.items() if key in made}
    assert made == expected


def test_every_family_is_tested(tmp_path: Path) -> None:
    tested = set()
    for family in FAMILIES:
        gguf = read_gguf(converted(family, tmp_path))
        tested.add((gguf.metadata["general.architecture"], gguf_config(gguf)["architectures"][0]))
    tables = {(family.architecture, family.class_name) for family in TABLES}
    assert tested == tables - {("mistral3", "MistralForCausalLM")}  # see the next


def test_mistral_without_a_temperature_is_the_plain_one(tmp_path: Path) -> None:
    change: dict[str, Any] = {"mistral3.attention.temperature_scale": None}
    change["mistral3.rope.scaling.type"] = change["mistral3.rope.scaling.yarn_log_multiplier"] = None
    change |= {f"mistral3.rope.scaling.yarn_beta_{speed}": None for speed in ("fast", "slow")}
    config = changed("ministral3", tmp_path, change)
    assert (config["architectures"], config["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert config["rope_parameters"] == {"rope_theta": 1_000_000.0, "rope_type": "default"}
    assert config["sliding_window"] is None


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


def test_gemma_3_of_27_billion_parameters_scales_queries_otherwise(tmp_path: Path) -> None:
    change = {"gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    assert changed("gemma3", tmp_path, change)["query_pre_attn_scalar"] == 168
    assert changed("gemma3", tmp_path, change | {"gemma3.block_count": 34})["query_pre_attn_scalar"] == 16


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


def test_a_router_with_a_bias_is_a_sigmoid_one_although_the_file_does_not_say_it(tmp_path: Path) -> None:
    change = {"deepseek2.expert_gating_func": None}
    assert changed("deepseek_v3", tmp_path, change)["architectures"] == ["DeepseekV3ForCausalLM"]
    assert changed("deepseek_v2", tmp_path, change)["architectures"] == ["DeepseekV2ForCausalLM"]


def test_older_files_of_deepseek_have_the_sizes_of_whole_heads(tmp_path: Path) -> None:
    change = {f"deepseek2.attention.{kind}_length_mla": None for kind in ("key", "value")}
    change |= {"deepseek2.attention.key_length": 24, "deepseek2.attention.value_length": 12}
    config = changed("deepseek_v3", tmp_path, change | {"deepseek2.attention.head_count_kv": 4})
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_key_value_heads")
    assert [config[size] for size in sizes] == [16, 8, 12, 4]
