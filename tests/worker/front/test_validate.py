import math
from typing import Any

import pytest

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.front.validate import defect

MODEL = pb.Model(vocab_size=100, max_model_len=50)


def request(sampling: dict[str, Any] | None = None, **fields: Any) -> pb.Submit:
    good = {"temperature": 1, "top_p": 1, "repetition_penalty": 1}
    defaults: dict[str, Any] = {"token_ids": [1, 2, 3], "max_tokens": 5}
    return pb.Submit(sampling=pb.Sampling(**(good | (sampling or {}))), **(defaults | fields))


@pytest.mark.parametrize(
    "good",
    [
        request(),
        request(token_ids=[99]),
        request(token_ids=range(49), resumed=48, max_tokens=49),
        request(min_tokens=5, stop_token_ids=[0, 99]),
        request({"temperature": 0, "min_p": 1, "presence_penalty": -2, "frequency_penalty": 2}),
        request({"logit_bias": {99: -100.0}, "logprobs": 20, "top_k": 1000}),
        request(grammar=pb.Grammar(text='start: "x"')),
    ],
)
def test_good_requests_pass(good: pb.Submit) -> None:
    assert defect(good, MODEL) is None


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (request(token_ids=[]), "token_ids is empty"),
        (request(token_ids=[1, 100]), "id 100"),
        (request(token_ids=range(50)), "50 tokens"),
        (request(resumed=3, max_tokens=9), "resumed is 3"),
        (request(max_tokens=0), "max_tokens is 0"),
        (request(resumed=2, max_tokens=2), "max_tokens is 2"),
        (request(min_tokens=6), "min_tokens"),
        (request(stop_token_ids=[100]), "stop_token_ids"),
        (request({"temperature": -0.1}), "temperature"),
        (request({"temperature": math.nan}), "temperature"),
        (request({"temperature": math.inf}), "temperature"),
        (request({"top_p": 0}), "top_p"),
        (request({"top_p": 1.01}), "top_p"),
        (request({"min_p": 1.5}), "min_p"),
        (request({"repetition_penalty": 0}), "repetition_penalty"),
        (request({"presence_penalty": math.inf}), "presence_penalty"),
        (request({"frequency_penalty": math.nan}), "frequency_penalty"),
        (request({"logprobs": 101}), "logprobs"),
        (request({"logit_bias": {100: 1.0}}), "logit_bias of 100"),
        (request({"logit_bias": {1: math.nan}}), "logit_bias of 1"),
        (pb.Submit(token_ids=[1], max_tokens=1), "top_p is 0"),
    ],
)
def test_bad_requests_are_told_what_is_wrong(bad: pb.Submit, word: str) -> None:
    assert word in (defect(bad, MODEL) or "")
