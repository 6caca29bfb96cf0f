"""A GGUF file's metadata, read key by key, and the small functions that families' tables are made of."""

from collections.abc import Callable
from typing import Any

import numpy as np

from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.gguf.file import Gguf

# Say nothing about what is computed. "Meta AI original pth" describes the order of rows that all files have.
_IRRELEVANT = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
# Of the encoders for pictures and sound, which some files have too.
_ENCODERS = ("vision.", "audio.")


class Keys:
    """The metadata of one architecture. Remembers what was asked for, to find what nobody understood."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf, self.prefix = gguf, f"{gguf.metadata.get('general.architecture')}."
        names = {key.removeprefix(self.prefix) for key in gguf.metadata if key.startswith(self.prefix)}
        self.unknown = {name for name in names - _IRRELEVANT if not name.startswith(_ENCODERS)}

    def raw(self, key: str, default: Any = None) -> Any:
        """A value as it is stored, which may be a list with one value a layer."""
        self.unknown.discard(key)
        value = self.gguf.metadata.get(self.prefix + key, default)
        # Stored as fp32: the shortest decimal that means the same is the number its authors wrote.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def get(self, key: str, default: Any = None) -> Any:
        """A value; a list with one value a layer counts as that value if all layers have the same."""
        value = self.raw(key, default)
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

    def layers(self, key: str) -> list[Any] | None:
        """A list with one value for each of the model's layers, the same for all if one is stored."""
        value = self.raw(key)
        if value is None:
            return None
        count = num_layers(self)
        values = value if isinstance(value, list) else [value] * count
        if len(values) < count:
            raise CheckpointError(
                f"{self.gguf.path}: {self.prefix}{key} has {len(values)} values for {count} layers."
            )
        return values[:count]

    def only(self, key: str, *allowed: Any) -> None:
        """Refuses a value that would need other code than the models have."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise CheckpointError(f"{self.gguf.path}: {self.prefix}{key} = {value!r} is not supported.")

    def has(self, tensor: str) -> bool:
        return tensor in self.gguf.tensors


# What a key of `config.json` is, told by the metadata.
Value = Callable[[Keys], Any]


def need(key: str) -> Value:
    return lambda keys: keys.need(key)


def get(key: str, default: Any = None) -> Value:
    return lambda keys: keys.get(key, default)


def const(value: Any) -> Value:
    return lambda keys: value


def tensor(name: str) -> Value:
    """Whether the file has the tensor."""
    return lambda keys: keys.has(name)


def num_layers(keys: Keys) -> int:
    """The layers of the model itself. Those that predict further tokens (MTP) come after them."""
    count = keys.need("block_count") - keys.get("nextn_predict_layers", 0)
    if count < 1:
        raise CheckpointError(f"{keys.gguf.path} has {count} layers.")
    return int(count)


def vocab_size(keys: Keys) -> int:
    return keys.gguf.tensors["token_embd.weight"].shape[0]


def head_dim(keys: Keys) -> int:
    dim = keys.get("attention.key_length")
    if dim is None:
        dim = keys.need("embedding_length") // keys.need("attention.head_count")
    keys.only("attention.value_length", dim)
    return int(dim)


def num_kv_heads(keys: Keys) -> int:
    return int(keys.get("attention.head_count_kv", keys.need("attention.head_count")))


def token_id(name: str) -> Value:
    return lambda keys: keys.gguf.metadata.get(f"tokenizer.ggml.{name}_token_id")
