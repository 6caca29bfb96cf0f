"""Asks a worker how it is: GetStatus over gRPC, once or again and again."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog

from moebius_controller.types import Health, State
from moebius_proto.channel import WorkerTls, open_channel
from moebius_proto.worker.v1 import worker_pb2, worker_pb2_grpc

_CHANNEL_OPTIONS = (
    # A worker that comes back is to be heard at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Nor does one connection's back-off, or a proxy, stand in the way of another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Seconds from an answer to the next question, and for which an answer is waited."""

    interval: float
    timeout: float

    @property
    def longest_round(self) -> float:
        """A longer time between two answers means that this process did not run: no fault of the worker."""
        return self.timeout + 2 * self.interval


class Probe:
    """A connection to the worker at `address`."""

    def __init__(self, address: str, tls: WorkerTls | None = None) -> None:
        self._address = address
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None

    async def status(self, within: float) -> worker_pb2.Status | None:
        """None if it does not answer within that many seconds."""
        try:
            if self._channel is None:
                self._channel = open_channel(self._address, self._tls, _CHANNEL_OPTIONS)
            worker = worker_pb2_grpc.WorkerStub(self._channel)
            return await worker.GetStatus(worker_pb2.GetStatusRequest(), timeout=within)
        except grpc.aio.AioRpcError:
            if self._tls is not None:
                # The next one reads certificates that were replaced meanwhile.
                await self.close()
        except OSError as error:
            log.warning("a certificate cannot be read", error=str(error))
        return None

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)


class Pulse:
    """What the worker at an address said last, and for how long it has been silent."""

    def __init__(self, probe: Probe, rhythm: Rhythm, believe: Callable[[worker_pb2.Status], bool]) -> None:
        """`believe`: whether who answered is the worker that is meant."""
        self.health: Health | None = None
        self.silence = 0.0
        self._probe = probe
        self._rhythm = rhythm
        self._believe = believe

    async def feel(self, at_once: asyncio.Semaphore | None = None) -> None:
        """Asks again and again, until it is cancelled. `at_once` limits how many ask at the same time."""
        before = time.monotonic()
        try:
            while True:
                if at_once is None:
                    status = await self._probe.status(self._rhythm.timeout)
                else:
                    async with at_once:
                        # Waiting for one's turn is no silence of the worker's.
                        before = max(before, time.monotonic() - self._rhythm.interval)
                        status = await self._probe.status(self._rhythm.timeout)
                now = time.monotonic()
                if status is not None and self._believe(status):
                    self.health, self.silence = health_of(status), 0.0
                else:
                    self.silence += min(now - before, self._rhythm.longest_round)
                before = now
                await asyncio.sleep(self._rhythm.interval * random.uniform(0.9, 1.1))
        finally:
            await self._probe.close()


def health_of(status: worker_pb2.Status) -> Health:
    fault = status.last_fault
    return Health(
        state=state_of(status),
        requests=status.running + status.waiting,
        last_progress=status.last_progress_ms / 1000,
        last_fault=fault.message,
        fault_reason=reason_of(fault.reason) if status.HasField("last_fault") else "",
        fault_at=fault.time_ms / 1000,
        engine_restarts=status.restarts,
        level=status.fallback_level,
        levels=status.fallback_levels,
    )


def state_of(status: worker_pb2.Status) -> State:
    """`UNSPECIFIED` for a state that this build does not know."""
    known = worker_pb2.State.DESCRIPTOR.values_by_number.get(status.state)
    return State(known.name.removeprefix("STATE_")) if known else State.UNSPECIFIED


def reason_of(reason: int) -> str:
    known = worker_pb2.Reason.DESCRIPTOR.values_by_number.get(reason)
    return known.name.removeprefix("REASON_") if known else "UNSPECIFIED"
