"""What a simulated model says, without an engine around it."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.faults import InjectedError
from moebius_worker.engine.types import SampleRow, SamplingParams, Slice
from moebius_worker.sim.answer import answer_length, word_at
from moebius_worker.sim.arrivals import Arrivals
from moebius_worker.sim.model import SimModel
from moebius_worker.sim.settings import SimFault, SimSettings
from moebius_worker.sim.vocabulary import vocabulary
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE, write_checkpoint

LOGITS = np.zeros((1, 0), dtype=np.float32)


class NoEnds:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def die(self) -> None:
        self.asked.append("die")

    def stall(self) -> None:
        self.asked.append("stall")

    def reset(self) -> None:
        self.asked.append("reset")


def model(ends: NoEnds | None = None, **fields: object) -> SimModel:
    settings = SimSettings.model_validate({"itl": 0} | fields)
    return SimModel(settings, vocabulary(""), ends or NoEnds())


def say(model: SimModel, seed: int, count: int, before: tuple[int, ...] = ()) -> list[int]:
    tokens = list(before)
    while len(tokens) < count:
        row = SampleRow(SamplingParams(seed=seed), (5, 6), tuple(tokens))
        tokens.append(model.sample(LOGITS, [row])[0].token_id)
    return tokens


def test_its_own_tokenizer_says_words() -> None:
    own = vocabulary("")
    tokenizer = Tokenizer.from_str(own.files["tokenizer.json"].decode())
    assert tokenizer.get_vocab_size() == own.size
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界!").ids) == "Grüße, 世界!"
    text = tokenizer.decode(list(own.words[:3]))
    assert text == " a about above"
    assert tokenizer.encode("<|im_end|>").ids == list(own.eos_token_ids)
    assert [tokenizer.decode([token_id]) for token_id in own.closing] == list('"}],')


def test_a_checkpoint_lends_its_tokenizer(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    lent = vocabulary(str(path))
    assert (lent.name, lent.size, lent.eos_token_ids) == ("tiny", VOCAB_SIZE, (EOS_TOKEN_ID,))
    assert lent.files["tokenizer.json"] == (path / "tokenizer.json").read_bytes()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert all(tokenizer.decode([word])[1:].isalpha() for word in lent.words)


def test_a_tokenizer_without_words_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    content = json.loads((path / "tokenizer.json").read_bytes())
    content["model"] = {"type": "WordLevel", "vocab": {"A": 0}, "unk_token": "A"}
    (path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="no words"):
        vocabulary(str(path))


def test_what_it_says_depends_on_seed_and_position() -> None:
    words = vocabulary("").words
    whole = say(model(), seed=7, count=40)
    assert whole == [word_at(7, position, words) for position in range(40)]
    assert say(model(), seed=7, count=40, before=tuple(whole[:13])) == whole
    assert say(model(), seed=8, count=40) != whole
    assert len(set(whole)) > 20


def test_answers_end_at_lengths_around_the_typical_one() -> None:
    lengths = [answer_length(seed, 100) for seed in range(400)]
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150
    [eos] = vocabulary("").eos_token_ids
    tokens = say(model(answer_tokens=100), seed=3, count=answer_length(3, 100) + 1)
    assert tokens.index(eos) == answer_length(3, 100)
    assert say(model(answer_tokens=100), seed=3, count=300).count(eos) == 1, "ignored, it goes on"


def test_one_that_must_not_end_yet_goes_on() -> None:
    [eos] = vocabulary("").eos_token_ids
    row = SampleRow(SamplingParams(seed=3), (5,), (9,) * 200, banned=frozenset({eos}))
    assert model(answer_tokens=10).sample(LOGITS, [row])[0].token_id in vocabulary("").words


def test_logprobs_have_as_many_as_were_asked_for() -> None:
    row = SampleRow(SamplingParams(seed=3, logprobs=4), (5,), ())
    [sampled] = model().sample(LOGITS, [row])
    assert sampled.logprobs is not None
    ids = [token_id for token_id, _ in sampled.logprobs.top]
    assert (ids[0], len(set(ids))) == (sampled.token_id, 4)


def test_faults_come_after_so_many_tokens_and_once() -> None:
    ends = NoEnds()
    faults = [SimFault(action="die", after_tokens=5), SimFault(action="raise", after_tokens=2)]
    faulty = model(ends, faults=faults)
    pieces = [Slice(1, (5,), 0, (0,), True)]
    say(faulty, 1, 1)
    faulty.step(pieces, lambda: None)
    say(faulty, 1, 1)
    with pytest.raises(InjectedError):
        faulty.step(pieces, lambda: None)
    faulty.step(pieces, lambda: None)
    assert ends.asked == []
    say(faulty, 1, 3)
    faulty.step(pieces, lambda: None)
    faulty.step(pieces, lambda: None)
    assert ends.asked == ["die"]


def submit(handle: int) -> engine_pb2.FrontFrame:
    return engine_pb2.FrontFrame(submit=worker_pb2.Submit(handle=handle))


def test_arrivals_wait_until_they_are_due() -> None:
    arrivals = Arrivals()
    assert arrivals.pause(0.0) is None
    for handle, due in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 1.0)):
        arrivals.hold(submit(handle), due)
    assert arrivals.pause(0.25) == 0.75
    assert arrivals.release(0.9) == []
    assert [frame.submit.handle for frame in arrivals.release(1.0)] == [2, 4]
    assert arrivals.cancel(3)
    assert not arrivals.cancel(2), "it went on"
    assert [frame.submit.handle for frame in arrivals.release(9.0)] == [1]
    assert arrivals.pause(9.0) is None
