"""GGUF metadata, told in the words of a Hugging Face `config.json`.

llama.cpp's architecture `llama` covers the dense Llama and, with experts, Mixtral. A key of the architecture
that is not understood is refused by name: it may change what the model computes.
"""

from typing import Any

import numpy as np

from .errors import CheckpointError
from .gguf_file import Gguf

# Say nothing about what is computed. "Meta AI original pth" describes the order of rows that all files have.
_IRRELEVANT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
_SOFTMAX = 1
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Tokens that end a turn although the metadata may name only the end of the text.
_TURN_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"}


class _Keys:
    """The metadata of one architecture. Remembers what was asked for, to find what nobody understood."""

    def __init__(self, gguf: Gguf, architecture: str) -> None:
        self.gguf, self.prefix = gguf, architecture + "."
        self.unknown = {
            key.removeprefix(self.prefix) for key in gguf.metadata if key.startswith(self.prefix)
        } - _IRRELEVANT

    def get(self, key: str, default: Any = None) -> Any:
        """A value; a list with one value a layer counts as that value if all layers have the same."""
        self.unknown.discard(key)
        value = self.gguf.metadata.get(self.prefix + key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise CheckpointError(
                    f"{self.gguf.path}: {self.prefix}{key} differs between layers, which is not supported."
                )
            return value[0]
        return value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.gguf.path} lacks the metadata key {self.prefix}{key}.")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses a value that would need other code than the models have."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(f"{self.gguf.path}: {self.prefix}{key} = {value!r} is not supported.")


def gguf_config(gguf: Gguf) -> dict[str, Any]:
    """The `config.json` of a GGUF model. Raises CheckpointError for what cannot be computed faithfully."""
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{gguf.path}: the GGUF architecture {architecture!r} is not supported. "
            "Supported is llama, which covers the dense Llama models and Mixtral."
        )
    keys = _Keys(gguf, architecture)
    if "token_embd.weight" not in gguf.tensors:
        raise CheckpointError(f"{gguf.path} lacks the tensor token_embd.weight: it holds no language model.")
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    head_dim = keys.get("attention.key_length", hidden // heads)
    keys.only("attention.value_length", head_dim)
    keys.only("rope.dimension_count", head_dim)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys.need("feed_forward_length"),
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": keys.need("context_length"),
        # Stored as fp32: the shortest decimal that means the same is the number its authors wrote.
        "rms_norm_eps": float(str(np.float32(keys.need("attention.layer_norm_rms_epsilon")))),
        "rope_theta": keys.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(gguf, keys),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    for name in ("bos", "eos", "padding"):
        token_id = gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[{"padding": "pad"}.get(name, name) + "_token_id"] = token_id
    if experts := keys.get("expert_count", 0):
        config |= _mixtral(keys, experts, config["intermediate_size"])
    else:
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in gguf.tensors
    if keys.unknown:
        names = ", ".join(sorted(keys.prefix + key for key in keys.unknown))
        raise CheckpointError(f"{gguf.path} has metadata that is not understood: {names}.")
    return config


def _mixtral(keys: _Keys, experts: int, intermediate_size: int) -> dict[str, Any]:
    keys.only("expert_gating_func", _SOFTMAX)
    keys.only("expert_weights_norm", True)
    keys.only("expert_weights_scale", 1.0)
    keys.only("expert_shared_count", 0)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": keys.need("expert_used_count"),
        "intermediate_size": keys.get("expert_feed_forward_length", intermediate_size),
        "sliding_window": None,
    }


def _rope_scaling(gguf: Gguf, keys: _Keys) -> dict[str, Any] | None:
    if "rope_freqs.weight" in gguf.tensors:
        keys.only("rope.scaling.type", "none", "llama3")
        return _llama3_rope(gguf, keys)
    kind, factor = keys.get("rope.scaling.type", "none"), keys.get("rope.scaling.factor", 1.0)
    linear = keys.get("rope.scale_linear")  # how older files say it
    original = keys.get("rope.scaling.original_context_length")
    if kind == "none":
        return {"rope_type": "linear", "factor": linear} if linear not in (None, 1.0) else None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise CheckpointError(f"{gguf.path}: {keys.prefix}rope.scaling.type = {kind!r} is not supported.")


def _llama3_rope(gguf: Gguf, keys: _Keys) -> dict[str, Any] | None:
    """Llama 3's rope scaling, found from what llama.cpp stores of it: the divisors of the frequencies."""
    tensor = gguf.tensors["rope_freqs.weight"]
    divisors = np.fromfile(tensor.file, "<f4", tensor.shape[-1], offset=tensor.offset)
    if np.all(divisors == 1):
        return None
    factor = float(divisors.max())
    wavelengths = (
        2 * np.pi * keys.get("rope.freq_base", 10000.0) ** (np.arange(len(divisors)) / len(divisors))
    )
    low, high, original = _LLAMA3_ROPE.values()
    # 0 for frequencies that turn less than `low` times in the original context, 1 above `high` times.
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise CheckpointError(
            f"{gguf.path}: the tensor rope_freqs.weight describes a rope scaling that is not Llama 3's "
            f"({_LLAMA3_ROPE}), which is the only one of its kind supported."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def gguf_generation_config(gguf: Gguf) -> dict[str, Any]:
    """The `generation_config.json` of a GGUF model: the ids that begin and end a text."""
    ids = [gguf.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens: list[str] = gguf.metadata.get("tokenizer.ggml.tokens", [])
    ids += [index for index, token in enumerate(tokens) if token in _TURN_ENDS]
    return {
        "bos_token_id": gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(index for index in ids if index is not None)),
    }
