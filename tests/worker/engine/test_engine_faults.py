"""The engine whole, with each kind of cache: requests that cannot be computed, and others beside them."""

import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.worker.engine.engine_world import MODELS, Engine, is_empty, load, tokens, with_pools, write_model

# Its embedding is not finite.
SPOILT = 9
LENGTH = pb.FINISH_REASON_LENGTH
SAMPLING = (
    pb.Sampling(top_p=1, repetition_penalty=1),
    pb.Sampling(top_p=1, repetition_penalty=1, logprobs=3),
    pb.Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=5),
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_model(tmp_path_factory.mktemp(kind), kind) for kind in MODELS}


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("kind", MODELS)
def test_faulty_requests_end_once_and_the_others_do_not_notice(
    models: dict[str, Path], kind: str, ahead: bool
) -> None:
    """Texts begin alike; some are faulty in their first chunk, in the last row or in the one before."""
    source, roomy = random.Random(3), Engine(load(models[kind]))
    roomy.runner._model.embedding.data[SPOILT] = torch.nan
    engine = Engine(with_pools(roomy.runner, 96, 64), max_running=9, ahead=ahead)
    shared = tokens(24, seed=5)
    prompts = {
        handle: shared[: source.choice([0, 4, 12, 24])] + tokens(source.randint(2, 20), seed=handle)
        for handle in range(1, 19)
    }
    prompts = {handle: [7 if one == SPOILT else one for one in ids] for handle, ids in prompts.items()}
    faulty = source.sample([*prompts], 7)
    for place, handle in enumerate(faulty):
        prompts[handle][(0, -2, -1)[place % 3]] = SPOILT
    sampling = {handle: source.choice(SAMPLING) for handle in prompts}
    failures: Counter[int] = Counter()
    send = engine.pipe.send

    def counting(frame: engine_pb2.EngineFrame) -> None:
        failures.update(failure.handle for failure in frame.end.failures)
        send(frame)

    engine.pipe.send = counting  # type: ignore[method-assign]
    waiting = [*prompts]
    while waiting or any(not seen.ended for seen in engine.seen.values()):
        for _ in range(min(len(waiting), source.choice([0, 1, 4]))):
            handle = waiting.pop()
            fields = {"max_tokens": source.randint(4, 20), "sampling": sampling[handle]}
            engine.submit(handle, prompts[handle], **fields)
        engine.turn()
    engine.finish()
    assert is_empty(engine)
    for handle, seen in engine.seen.items():
        if seen.tokens:
            expected = roomy.answer(prompts[handle], max_tokens=len(seen.tokens), sampling=sampling[handle])
            assert seen.tokens == expected.tokens, f"request {handle}"
        # Somebody may say the token, too, and go on with it.
        ended = bool(seen.finish)
        assert failures[handle] == (not ended)
        assert ended == (handle not in faulty and SPOILT not in seen.tokens[: None if not ended else -1])
        assert handle not in faulty or not seen.tokens
    # Nothing that is wrong was kept.
    for handle in faulty:
        again = engine.answer(prompts[handle], sampling=sampling[handle])
        assert again.error is not None
        assert "not finite" in again.error.message
