"""Every family out of a GGUF file, as llama.cpp converts it, against the model that was converted."""

from pathlib import Path

import pytest

from tests.worker.checkpoint.gguf_models import FAMILIES, converted, original_model
from tests.worker.engine.models.harness import check_chunks, check_one_piece, load


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_that_was_converted(tmp_path: Path, family: str) -> None:
    reference = original_model(family).eval()
    runner = load(converted(family, tmp_path))
    check_one_piece(runner, reference)
    check_chunks(runner, reference)
