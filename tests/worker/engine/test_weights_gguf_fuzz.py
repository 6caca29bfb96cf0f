"""A GGUF file whose tensors have any shape and any type: loaded, or refused as the checkpoint's fault."""

import dataclasses
import math
import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from moebius_worker.checkpoint import checkpoint as opening
from moebius_worker.checkpoint.checkpoint import CheckpointError, open_checkpoint
from moebius_worker.checkpoint.gguf.file import GgufTensor, read_gguf
from moebius_worker.engine.models.parameters import Place
from moebius_worker.engine.models.registry import build_model
from moebius_worker.engine.weights import gguf as reading
from moebius_worker.engine.weights.load import plan_loading
from moebius_worker.engine.weights.open import open_weights
from tests.worker.checkpoint.gguf_models import converted

META = Place(torch.device("meta"), torch.float32)
TYPES = list(GGMLQuantizationType)


def other_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(1,), (2, 2), shape[1:] or (3,), shape[:-1] or (3,), (1, *shape), (*shape, 1), shape[::-1]]


def changed(tensor: GgufTensor, source: random.Random) -> GgufTensor:
    shape, type_ = tensor.shape, tensor.type
    if source.random() < 0.7:
        shape = source.choice(other_shapes(shape))
    else:
        type_ = source.choice(TYPES)
    size, nbytes = GGML_QUANT_SIZES[type_]
    if shape[-1] % size:
        return tensor  # which `read_gguf` refuses itself
    return dataclasses.replace(tensor, shape=shape, type=type_, nbytes=math.prod(shape) // size * nbytes)


# With all that is done to tensors: rows and columns in another order, parts joined, experts in stacks.
@pytest.mark.parametrize("family", ["deepseek_v3", "gemma4_moe", "glm4_moe_lite", "llama", "qwen3_5_moe"])
def test_any_shape_and_type(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = converted(family, tmp_path)
    whole, source = read_gguf(path), random.Random(0)
    # The last of each kind of tensor.
    kinds = {name.split(".", 2)[-1]: name for name in whole.tensors}
    for name in kinds.values():
        for _ in range(4):
            tensors = {**whole.tensors, name: changed(whole.tensors[name], source)}
            spoilt = dataclasses.replace(whole, tensors=tensors)
            for module in (opening, reading):
                monkeypatch.setattr(module, "read_gguf", lambda path, spoilt=spoilt: spoilt)
            with suppress(CheckpointError):
                checkpoint = open_checkpoint(str(path))
                model = build_model(checkpoint.config, META)
                reader, scheme = open_weights(checkpoint, model.LAYOUT)
                plan_loading(
                    reader, scheme, model.slots(), model.ignores, dtype=torch.float32, expand=True
                ).allocate(META)
