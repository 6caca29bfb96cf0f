"""Why an engine ends though the front is there."""

from moebius_proto.worker.v1 import worker_pb2


class EngineDownError(Exception):
    """The engine cannot go on, but a new one may."""

    def __init__(self, reason: worker_pb2.Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason
