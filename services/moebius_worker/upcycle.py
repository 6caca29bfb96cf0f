"""Sparse upcycling: turns a dense Llama checkpoint into a Mixture of Experts in the Mixtral architecture.

Every expert is a copy of the dense FFN and the router is random. Mixtral's routing weights add up to one, so
that without noise the new model computes what the dense one computes, whatever the router says.

Komatsuzaki et al., Sparse Upcycling, https://arxiv.org/abs/2212.05055
"""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moebius_worker.checkpoint.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from moebius_worker.checkpoint.locate import Progress
from moebius_worker.checkpoint.quantization import quantization_name
from moebius_worker.checkpoint.tensor_info import TensorInfo
from moebius_worker.checkpoint.tokenizer import tokenizer_files
from moebius_worker.engine.weights.open import open_weights
from moebius_worker.engine.weights.reader import WeightReader
from moebius_worker.engine.weights.scheme import Scheme
from moebius_worker.upcycle_options import DTYPES, UpcycleOptions

_DEFAULTS = UpcycleOptions()
_DTYPES = {name: getattr(torch, name) for name in DTYPES}
_FFN = re.compile(r"(?P<layer>model\.layers\.\d+\.)mlp\.(?P<part>gate_proj|down_proj|up_proj)\.weight")
_EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_ROUTER = "block_sparse_moe.gate.weight"
# Spread of the router's logits over a token's experts: wide enough that the weights differ, narrow enough
# that more than the first expert counts.
_ROUTER_LOGIT_STD = 2.0
_SHARD_BYTES = 1 << 30


def upcycle(
    source: str,
    destination: Path,
    options: UpcycleOptions = _DEFAULTS,
    *,
    chat_template: str | None = None,
    progress: Progress = lambda what, done, total: None,
    shard_bytes: int = _SHARD_BYTES,
) -> Path:
    """Writes `source`, which is what `open_checkpoint` takes, upcycled to the directory `destination`.

    Works tensor by tensor with at most one shard of `shard_bytes` in memory. Returns the directory, which
    appears when it is complete: an interrupted run leaves nothing there. Raises CheckpointError, also for a
    destination that is occupied. `chat_template`: in place of the source's own.
    """
    options.check()
    destination = destination.absolute()
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise CheckpointError(f"{destination} exists already. Give another destination, or remove it first.")
    checkpoint = open_checkpoint(source, progress=progress)
    config = _mixtral_config(checkpoint, options)
    reader, scheme = open_weights(checkpoint)
    plan = _plan(reader, options)
    tokenizer = dict(tokenizer_files(checkpoint))
    if chat_template is not None:
        tokenizer["chat_template.jinja"] = chat_template.encode()
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process that had the same id
    try:
        partial.mkdir(parents=True)
        _check_space(partial, sum(piece.nbytes for piece in plan))
        for name, content in tokenizer.items():
            (partial / name).write_bytes(content)
        (partial / "config.json").write_text(json.dumps(config, indent=2))
        _write_weights(
            partial, plan, _Maker(reader, scheme, options), shard_bytes, progress, destination.name
        )
        partial.rename(destination)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"Cannot write {destination}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return destination


def _mixtral_config(checkpoint: Checkpoint, options: UpcycleOptions) -> dict[str, Any]:
    config = checkpoint.config
    architecture = config["architectures"][0]
    if architecture != "LlamaForCausalLM":
        raise CheckpointError(
            f"{checkpoint.name} is a {architecture}: only a dense Llama (LlamaForCausalLM) can be upcycled."
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise CheckpointError(f"{checkpoint.name} has {key}, which Mixtral does not know.")
    if (quantization := quantization_name(config)) is not None:
        raise CheckpointError(
            f"{checkpoint.name} is quantised with {quantization}: "
            "only floating point and GGUF can be upcycled."
        )
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"{checkpoint.name} computes {config['hidden_act']!r}, and Mixtral computes silu."
        )
    # Where Llama's and Mixtral's defaults differ, Llama's must be written out.
    defaults = {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "num_key_value_heads": config["num_attention_heads"],
    }
    if "rope_parameters" not in config:
        defaults["rope_theta"] = 10000.0
    dropped = {"attention_bias", "mlp_bias", "pretraining_tp", "torch_dtype"}
    return {
        **defaults,
        **{key: value for key, value in config.items() if key not in dropped},
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": options.experts,
        "num_experts_per_tok": options.top_k,
        "sliding_window": None,
        "dtype": options.dtype,
    }


@dataclass(frozen=True, slots=True)
class _Piece:
    """A tensor to write, made of the source's tensor `source`."""

    name: str
    source: str
    nbytes: int


def _plan(reader: WeightReader, options: UpcycleOptions) -> list[_Piece]:
    itemsize = _DTYPES[options.dtype].itemsize

    def piece(name: str, info: TensorInfo, source: str, shape: tuple[int, ...] | None = None) -> _Piece:
        shape = info.shape if shape is None else shape
        return _Piece(name, source, math.prod(shape) * itemsize)

    plan = []
    for name, info in reader.tensors.items():
        match = _FFN.fullmatch(name)
        if match is not None:
            stem, part = match["layer"] + "block_sparse_moe.experts.", _EXPERT_NAMES[match["part"]]
            plan += [piece(f"{stem}{expert}.{part}.weight", info, name) for expert in range(options.experts)]
        elif not name.endswith("rotary_emb.inv_freq"):  # old checkpoints store what the config says
            plan.append(piece(name, info, name))
        if name.endswith(".post_attention_layernorm.weight"):
            router = name.removesuffix("post_attention_layernorm.weight") + _ROUTER
            plan.append(piece(router, info, name, (options.experts, *info.shape)))
    return plan


class _Maker:
    """Makes the tensors of a plan, in its order: the random numbers are drawn one after the other."""

    def __init__(self, reader: WeightReader, scheme: Scheme, options: UpcycleOptions) -> None:
        self.reader, self.scheme, self.options = reader, scheme, options
        self.generator = torch.Generator().manual_seed(options.seed)
        # The experts of a layer follow each other, and are made of the same tensor.
        self.last: tuple[str, torch.Tensor] | None = None

    def make(self, piece: _Piece) -> torch.Tensor:
        weight = self._read(piece.source)
        if piece.name.endswith(_ROUTER):
            weight = self._router(weight)
        elif _FFN.fullmatch(piece.source) and self.options.noise > 0:
            weight = weight + self._normal(weight.shape) * (self.options.noise * weight.std())
        # Each expert needs memory of its own: a file cannot hold two names of one tensor.
        return weight.to(_DTYPES[self.options.dtype], copy=True)

    def _read(self, name: str) -> torch.Tensor:
        if self.last is None or self.last[0] != name:
            form = self.scheme.form(name, self.reader.tensors)
            self.last = (name, form.read(self.reader.read).dequantize())
        return self.last[1]

    def _router(self, norm: torch.Tensor) -> torch.Tensor:
        # The router sees normalised states times the norm's weights, whose length tells the logits' spread.
        return self._normal((self.options.experts, *norm.shape)) * (_ROUTER_LOGIT_STD / norm.norm())

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)


def _write_weights(
    directory: Path,
    plan: list[_Piece],
    maker: _Maker,
    shard_bytes: int,
    progress: Progress,
    name: str,
) -> None:
    shards = list(_shards(plan, shard_bytes))
    total, done = sum(piece.nbytes for piece in plan), 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = f"model{part}.safetensors"
        tensors = {}
        for piece in shard:
            tensors[piece.name] = maker.make(piece)
            weight_map[piece.name] = file
            done += piece.nbytes
            progress(f"upcycling {name}", done, total)
        save_file(tensors, directory / file, metadata={"format": "pt"})
        # `safetensors` writes for the owner's eyes alone.
        shutil.copymode(directory / "config.json", directory / file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(plan: list[_Piece], shard_bytes: int) -> Iterator[list[_Piece]]:
    shard: list[_Piece] = []
    size = 0
    for piece in plan:
        if shard and size + piece.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(piece)
        size += piece.nbytes
    yield shard


def _check_space(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            f"The upcycled model needs {needed / 1e9:.2f} GB; {directory.parent} has {free / 1e9:.2f} free."
        )
