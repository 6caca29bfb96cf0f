"""Asks a worker how it is: GetStatus over gRPC."""

import grpc

from moebius_controller.decide import Health, State
from moebius_proto.worker.v1 import worker_pb2, worker_pb2_grpc

_CHANNEL_OPTIONS = (
    # A worker that comes back is to be heard at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Nor does one connection's back-off, or a proxy, stand in the way of another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class Probe:
    """A connection to the worker at `address`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._worker = worker_pb2_grpc.WorkerStub(self._channel)

    async def status(self, within: float) -> worker_pb2.Status | None:
        """None if it does not answer within that many seconds."""
        try:
            return await self._worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=within)
        except grpc.aio.AioRpcError:
            return None

    async def close(self) -> None:
        await self._channel.close(None)


def health_of(status: worker_pb2.Status) -> Health:
    return Health(
        state=state_of(status),
        requests=status.running + status.waiting,
        last_progress=status.last_progress_ms / 1000,
        last_fault=status.last_fault.message,
    )


def state_of(status: worker_pb2.Status) -> State:
    """`UNSPECIFIED` for a state that this build does not know."""
    known = worker_pb2.State.DESCRIPTOR.values_by_number.get(status.state)
    return State(known.name.removeprefix("STATE_")) if known else State.UNSPECIFIED
