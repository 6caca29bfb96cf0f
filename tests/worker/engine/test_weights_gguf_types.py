"""A whole model in each of GGUF's types: as it is stored, and as a GPU's kernels read it."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from moebius_worker.engine.models.parameters import Matrix
from moebius_worker.engine.weights.schemes.ggml import BLOCK_TYPES
from tests.gpu.test_engine_gpu import distance, logits_of
from tests.worker.checkpoint.gguf_types import write_typed
from tests.worker.engine.models.harness import load


@pytest.mark.parametrize("type_", sorted(BLOCK_TYPES), ids=lambda type_: type_.name)
def test_logits_in_each_form_are_those_of_the_numbers(tmp_path: Path, type_: Type) -> None:
    path = write_typed(type_, tmp_path)
    expected = logits_of(load(path, page_size=16, expand_weights=True))
    runner = load(path, page_size=16, expand_weights=False)
    torch.testing.assert_close(logits_of(runner), expected, atol=1e-4, rtol=0)
    # Some factors are rounded to bf16 there.
    for matrix in {slot.owner for slot in runner._model.slots().values()}:
        if isinstance(matrix, Matrix):
            matrix.pack()
    assert distance(logits_of(runner), expected) < 0.05
