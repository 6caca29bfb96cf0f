"""What the loop tells of requests that do not go on."""

from moebius_proto.worker.v1 import worker_pb2
from moebius_worker.engine.types import Rejected

# How long a gateway had better wait when the queue is full.
RETRY_AFTER_MS = 1000

_REASONS = {
    "OVERLOADED": worker_pb2.REASON_OVERLOADED,
    "KV_EXHAUSTED": worker_pb2.REASON_KV_EXHAUSTED,
    "BAD_REQUEST": worker_pb2.REASON_BAD_REQUEST,
    # It waited in vain: that is what an overload is.
    "DEADLINE": worker_pb2.REASON_OVERLOADED,
}


def refused(handle: int, rejected: Rejected) -> worker_pb2.Failure:
    error = worker_pb2.Error(reason=_REASONS[rejected.reason], message=rejected.message)
    if error.reason == worker_pb2.REASON_OVERLOADED:
        error.retryable, error.retry_after_ms = True, RETRY_AFTER_MS
    return worker_pb2.Failure(handle=handle, error=error)


def failed(handle: int, message: str) -> worker_pb2.Failure:
    """Of a request that is to blame, or may be: a strike against it."""
    error = worker_pb2.Error(
        reason=worker_pb2.REASON_ENGINE_DEAD, message=message, retryable=True, in_step=True
    )
    return worker_pb2.Failure(handle=handle, error=error)


def not_finite(handle: int) -> worker_pb2.Failure:
    return failed(handle, "its logits are not finite")
