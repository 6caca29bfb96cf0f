"""What a submission says is what the scheduler gets."""

from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.engine.convert import request_from


def test_priority_and_deadline() -> None:
    request = request_from(pb.Submit(token_ids=[1], max_tokens=5, priority=-1, deadline_ms=1500), now=100.0)
    assert (request.priority, request.deadline) == (-1, 101.5)


def test_an_older_gateway_says_neither() -> None:
    request = request_from(pb.Submit(token_ids=[1], max_tokens=5), now=100.0)
    assert (request.priority, request.deadline) == (0, None)
