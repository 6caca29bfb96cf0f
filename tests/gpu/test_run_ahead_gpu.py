"""Steps that are launched ahead on a GPU, replays of graphs: the same tokens as one step after another."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gpu.gpu_models import CHECKPOINTS
from tests.gpu.test_engine_gpu import load, triton
from tests.worker.engine.engine_world import MODELS, Engine, is_empty, write_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")

# The prompts' lengths, and the answers'.
TEXTS = ((5, 60), (17, 90), (1, 33), (30, 64))


def engines(path: Path) -> tuple[Engine, Engine]:
    """One that does not launch ahead, and one that does."""
    made, operations = [], triton()
    for ahead in (False, True):
        runner = load(path, "cuda")
        runner.bind(operations)
        runner.capture(lambda size: True, lambda *_: None)
        settings = {"ahead": ahead, "draw_tokens": operations.draw_tokens}
        made.append(Engine(runner, **settings, max_running=4, max_step_tokens=64))
    return made[0], made[1]


def answers(engine: Engine, **fields: Any) -> list[tuple[list[int], int]]:
    vocab = engine.runner.vocab_size
    first = 1 + max(engine.seen, default=0)
    for handle, (length, said) in enumerate(TEXTS, first):
        prompt = random.Random(length).choices(range(vocab), k=length)
        engine.submit(handle, prompt, max_tokens=said, **fields)
    engine.finish()
    assert is_empty(engine)
    return [(engine.seen[handle].tokens, engine.seen[handle].finish) for handle in range(first, first + 4)]


def check(path: Path) -> None:
    plain, ahead = engines(path)
    for sampling in (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 1.0, "seed": 12, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    ):
        fields = {"sampling": pb.Sampling(**({"top_p": 1.0, "repetition_penalty": 1.0} | sampling))}
        expected = answers(plain, **fields)
        assert answers(ahead, **fields) == expected
        assert [len(tokens) for tokens, _ in expected] == [said for _, said in TEXTS]
    # One alone, ended by a token that it says: what follows it is computed in vain.
    stop = expected[1][0][40]
    for engine in (plain, ahead):
        prompt = random.Random(17).choices(range(engine.runner.vocab_size), k=17)
        found = engine.answer(prompt, max_tokens=90, stop_token_ids=[stop], **fields)
        assert found.tokens == expected[1][0][: expected[1][0].index(stop) + 1]
        assert is_empty(engine)


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda path: path.name)
def test_the_same_tokens_as_one_step_after_another(path: Path) -> None:
    check(path)


@pytest.mark.parametrize("kind", MODELS)
def test_the_same_tokens_with_windows_and_states(tmp_path: Path, kind: str) -> None:
    check(write_model(tmp_path, kind))


def test_the_same_tokens_while_graphs_are_left_out(tmp_path: Path) -> None:
    """As on probation, which ends in the midst of a request."""
    plain, ahead = engines(write_model(tmp_path, "full"))
    looks = iter(range(60))
    ahead.runner.eager = lambda: next(looks, None) is not None
    assert answers(ahead) == answers(plain)
    assert next(looks, None) is None
    assert ahead.runner.eager() is False


def test_a_row_that_is_not_finite_ends_its_request_alone(tmp_path: Path) -> None:
    """Nothing was drawn from it, so there is no token: the step that was launched after it must not fault."""
    made = engines(write_model(tmp_path, "full"))
    bad = answers(made[0])[1][0][20]
    for engine in made:
        # To compute this token spoils its row.
        engine.runner._model.embedding.data[bad] = float("nan")
        answers(engine)
    plain, ahead = (
        [(seen.tokens, seen.error and seen.error.reason) for seen in list(one.seen.values())[-4:]]
        for one in made
    )
    assert ahead == plain
    tokens, reason = plain[1]
    assert (tokens[-1], reason) == (bad, pb.REASON_ENGINE_DEAD)
    assert any(reason is None for _, reason in plain)
