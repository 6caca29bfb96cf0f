"""Writes GGUF files for tests as llama.cpp's converter does, from a Hugging Face checkpoint."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Type = gguf.GGMLQuantizationType
Quantize = Callable[[str, np.ndarray], Type]

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `LlamaModel.permute`, which orders the rows of q and k for its rotary embedding."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def gguf_tensors(directory: Path) -> dict[str, np.ndarray]:
    """The weights of a Llama or Mixtral checkpoint, named, permuted and stacked as in GGUF."""
    from safetensors.torch import load_file

    config = json.loads((directory / "config.json").read_text())
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        array = tensor.float().numpy()
        stem, kind = name.rsplit(".", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        if ".experts." in stem:
            _, _, number, part = stem.split(".")
            experts.setdefault(f"{prefix}{EXPERTS[part]}.{kind}", {})[int(number)] = array
            continue
        if stem == "self_attn.q_proj":
            array = permute(array, config["num_attention_heads"])
        if stem == "self_attn.k_proj":
            array = permute(array, config["num_key_value_heads"])
        tensors[f"{prefix}{NAMES[stem]}.{kind}"] = array
    tensors |= {name: np.stack([parts[n] for n in sorted(parts)]) for name, parts in experts.items()}
    return tensors


def llama_metadata(directory: Path) -> dict[str, Any]:
    """The keys `llama.*` of a Llama or Mixtral checkpoint."""
    config = json.loads((directory / "config.json").read_text())
    rope = config.get("rope_parameters", {})
    metadata = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "vocab_size": config["vocab_size"],
    }
    if "num_local_experts" in config:
        metadata |= {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
        }
    return {f"llama.{key}": value for key, value in metadata.items()}


def byte_level_metadata(tokenizer_json: Path, pre: str, vocab_size: int) -> dict[str, Any]:
    """The keys `tokenizer.ggml.*` of a byte-level BPE tokenizer; ids without a token become unused ones."""
    content = json.loads(tokenizer_json.read_text())
    tokens, types = [f"[PAD{index}]" for index in range(vocab_size)], [5] * vocab_size
    for token, index in content["model"]["vocab"].items():
        tokens[index], types[index] = token, 1
    for added in content["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], 3 if added["special"] else 4
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
    }


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    quantize: Quantize = lambda name, array: Type.F32,
    architecture: str = "llama",
    **options: Any,
) -> Path:
    """Writes a file; `quantize` gives each tensor's type. Arrays of uint8 are blocks of that type already."""
    writer = gguf.GGUFWriter(path, architecture, **options)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, array in tensors.items():
        type_ = quantize(name, array)
        data = array if array.dtype == np.uint8 else gguf.quants.quantize(array, type_)
        writer.add_tensor(name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_llama_gguf(
    path: Path,
    directory: Path,
    quantize: Quantize = lambda name, array: Type.F32,
    pre: str = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """The checkpoint in `directory` as GGUF, with its tokenizer; `metadata` is added to it."""
    config = json.loads((directory / "config.json").read_text())
    keys = llama_metadata(directory) | byte_level_metadata(
        directory / "tokenizer.json", pre, config["vocab_size"]
    )
    keys |= {
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
    }
    return write_gguf(path, keys | dict(metadata or {}), gguf_tensors(directory), quantize)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)
