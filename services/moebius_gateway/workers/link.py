"""The connection to one worker: one `Attach` stream, opened again for ever, and what is learnt over it."""

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import grpc
import structlog

from moebius_common.backoff import backoff
from moebius_gateway.journal import DEATHS, Failure, Submission
from moebius_gateway.types import ModelInfo, Reason
from moebius_gateway.workers import wire
from moebius_gateway.workers.attempt import Attempt
from moebius_gateway.workers.catalog import Catalog
from moebius_gateway.workers.health import Health
from moebius_gateway.workers.member import Member
from moebius_gateway.workers.metrics import DispatcherMetrics
from moebius_gateway.workers.prefix_index import PrefixIndex
from moebius_gateway.workers.tokenizer_files import read_tokenizer
from moebius_gateway.workers.view import Standing, WorkerState, WorkerView
from moebius_proto.channel import WorkerTls, open_channel
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_proto.worker.v1.worker_pb2_grpc import WorkerStub

log = structlog.get_logger(__name__)

# Each session has a channel of its own, so that it resolves names anew, inherits no back-off, and reads
# certificates that were replaced.
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
FIRST_PAUSE = 0.05
# Silence is looked for so many times in a `silence_timeout`; a gateway that was itself stopped for long
# finds one silent interval, not a silent worker.
SILENCE_CHECKS = 10


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """`silence_timeout`: seconds without a frame after which the worker counts as dead.

    `reconnect_pause`: the longest pause in seconds between two tries to attach.
    """

    gateway_id: str
    silence_timeout: float
    reconnect_pause: float
    # None: without TLS.
    tls: WorkerTls | None = None


class LinkLostError(Exception):
    """The stream is over; the message says why."""


class Link:
    """One worker as the gateway sees it. Calls `changed` whenever a decision might come out differently."""

    def __init__(
        self,
        member: Member,
        options: LinkOptions,
        catalog: Catalog,
        prefixes: PrefixIndex,
        metrics: DispatcherMetrics,
        changed: Callable[["Link"], None],
    ) -> None:
        self.member = member
        self.address = member.address
        self.standing = Standing(member.address)
        self._prefixes = prefixes
        self._options = options
        self._catalog = catalog
        self._tell = changed
        self._ejections = metrics.ejections.labels(member.name)
        self._reconnects = metrics.reconnects.labels(member.name)
        self._outbox: asyncio.Queue[pb.GatewayFrame] = asyncio.Queue()
        self._attempts: dict[int, Attempt] = {}
        metrics.worker_streams.labels(member.name).set_function(lambda: len(self._attempts))
        # None while not attached.
        self._status: pb.Status | None = None
        self._state = WorkerState.UNREACHABLE
        self._retiring = False
        self._detail = "not attached yet"
        self._incarnation = ""
        self._model: ModelInfo | None = None
        self._page_size = 0
        # Requests of others, and the tokens that they take of the KV cache, as of the last report.
        self._foreign_load = 0
        self._foreign_tokens = 0
        self._health = Health()
        self._heard = False
        self._unlearnt = asyncio.Event()
        self._sessions = 0

    def view(self) -> WorkerView:
        status = self._status
        leaves = self._retiring and self._state is WorkerState.READY
        return WorkerView(
            address=self.address,
            name=self.member.name,
            state=WorkerState.DRAINING if leaves else self._state,
            detail=self._detail,
            incarnation=self._incarnation,
            model=self._model,
            in_flight=len(self._attempts),
            load=self._foreign_load + len(self._attempts),
            max_running=status.max_running if status is not None else 1,
            kv_tokens=status.kv_pages_total * self._page_size if status is not None else 0,
            foreign_kv_tokens=self._foreign_tokens,
            on_trial=self._health.on_trial,
            ejected_until=self._health.ejected_until,
        )

    def submit(
        self, submission: Submission, blocks: Sequence[int], deadline: float, *, suspect: bool = False
    ) -> Attempt:
        """Sends it; `blocks` are those of its prompt. Only for a worker whose view is ready.

        `suspect`: workers died of it before; that a step raises under it is not held against this one.
        """
        length = len(submission.token_ids)
        attempt = Attempt(submission.handle, length, deadline, self._cancel, suspect=suspect)
        self._attempts[submission.handle] = attempt
        self._stand()
        self._prefixes.learn(blocks, self._incarnation)
        self._outbox.put_nowait(wire.submit_frame(submission))
        return attempt

    def retire(self) -> None:
        """It was told to go: what runs there may finish, nothing new goes there."""
        if not self._retiring:
            self._retiring = True
            self._changed()

    def close(self) -> None:
        """It is no worker any more: what runs there ends, and all that was learnt about it is dropped."""
        self._retiring = True
        self._detach("it is no worker any more")
        self._prefixes.drop(self._incarnation)
        self._tell = lambda link: None

    async def run(self) -> None:
        """Attaches, and again whenever the stream is lost, until cancelled."""
        failed, logged = 0, ""
        while True:
            begun = time.monotonic()
            why = await self._session()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # A task group that fails in the moment of its cancellation forgets the cancellation.
                raise asyncio.CancelledError
            # One that is there but fails at once is tried no more often than one that is not there.
            lasted = time.monotonic() - begun > self._options.reconnect_pause
            failed = 0 if lasted else failed + 1
            pause = backoff(FIRST_PAUSE, failed, self._options.reconnect_pause)
            # Once for each cause, not once for each try.
            level = log.debug if why == logged else log.warning
            level("worker not attached", worker=self.member.name, why=why)
            logged = why
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _session(self) -> str:
        """One stream from attaching to its end; returns why it ended."""
        why = "the gateway is stopping"
        try:
            async with (
                open_channel(self.address, self._options.tls, CHANNEL_OPTIONS) as channel,
                asyncio.TaskGroup() as tasks,
            ):
                stub = WorkerStub(channel)
                self._outbox = asyncio.Queue()
                self._outbox.put_nowait(wire.hello_frame(self._options.gateway_id))
                call = stub.Attach()
                tasks.create_task(self._write(call, self._outbox))
                tasks.create_task(self._watch_silence())
                tasks.create_task(self._learn_models(stub))
                await self._read(call)
        except* LinkLostError as lost:
            why = str(lost.exceptions[0])
        except* OSError as error:
            why = f"a TLS file cannot be read: {error.exceptions[0]}"
        except* Exception:
            # A defect, here or in what the worker sent: not a reason to give the worker up for good.
            log.exception("worker link failed", worker=self.member.name)
            why = "an internal error of the gateway, see its log"
        finally:
            self._detach(why)
        return why

    async def _read(self, call: grpc.aio.StreamStreamCall) -> None:
        try:
            while isinstance(frame := await call.read(), pb.WorkerFrame):
                self._take(frame)
        except grpc.aio.AioRpcError as error:
            raise LinkLostError(f"{error.code().name}: {error.details()}") from error
        raise LinkLostError("the worker ended the stream")

    async def _write(self, call: grpc.aio.StreamStreamCall, outbox: asyncio.Queue[pb.GatewayFrame]) -> None:
        try:
            while True:
                await call.write(await outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The stream is over: the reader learns that as well, and why.
            log.debug("worker link not writable", worker=self.member.name, why=str(error))

    async def _watch_silence(self) -> None:
        silent = 0
        while silent < SILENCE_CHECKS:
            self._heard = False
            await asyncio.sleep(self._options.silence_timeout / SILENCE_CHECKS)
            silent = 0 if self._heard else silent + 1
        raise LinkLostError(f"nothing heard from the worker for {self._options.silence_timeout:g} s")

    async def _learn_models(self, stub: WorkerStub) -> None:
        """Asks what the worker serves whenever a ready incarnation has not said so."""
        timeout = self._options.silence_timeout
        while True:
            await self._unlearnt.wait()
            self._unlearnt.clear()
            if self._model is not None:
                continue
            incarnation = self._incarnation
            try:
                model = await stub.GetModel(pb.GetModelRequest(), timeout=timeout)
                await self._catalog.fetch(model.tokenizer_hash, partial(read_tokenizer, stub, model))
            except grpc.aio.AioRpcError as error:
                # The next status, within a second, asks again.
                log.warning(
                    "worker does not say what it serves", worker=self.member.name, why=error.details()
                )
                continue
            if incarnation == self._incarnation:
                self._model = wire.model_info(model, created=int(time.time()))
                self._page_size = model.page_size
                log.info("worker ready", worker=self.member.name, model=model.id, incarnation=incarnation)
                self._changed()

    def _take(self, frame: pb.WorkerFrame) -> None:
        """A whole frame in one pass. Handles that are not known belong to attempts that were given up."""
        self._heard = True
        for receiver, delta in self._addressed(frame.deltas):
            if delta.handle not in self._attempts:
                continue  # it has ended within this frame
            receiver.push(tokens := wire.tokens(delta))
            if tokens.finish_reason is not None:
                del self._attempts[delta.handle]
        if frame.deltas and self._health.losses:
            self._health = Health()
            self._changed()
        # Whether the engine ended, or only a step of it.
        ended = frame.HasField("status") and frame.status.state != pb.STATE_READY
        died = False
        for failure in frame.failures:
            if (attempt := self._forget(failure.handle)) is not None:
                why = wire.failure(failure.error, self.address, self._incarnation)
                died = died or (why.reason in DEATHS and (ended or not attempt.suspect))
                attempt.fail(why)
        if died:
            self._lost()
        # After the failures, which belong to the incarnation before.
        if frame.HasField("status"):
            self._take_status(frame.status)
        self._stand()

    def _addressed(self, deltas: Iterable[pb.Delta]) -> list[tuple[Attempt, pb.Delta]]:
        """First those that bring a first token: what is taken first is sent first, and others wait less."""
        known = [(attempt, delta) for delta in deltas if (attempt := self._attempts.get(delta.handle))]
        return sorted(known, key=_has_begun)

    def _take_status(self, status: pb.Status) -> None:
        before, self._status = self._status, status
        if before is None:
            self._sessions += 1
            if self._sessions > 1:
                self._reconnects.inc()
        if status.incarnation != self._incarnation:
            self._start_incarnation(status.incarnation)
        self._state = wire.state(status)
        self._foreign_load = max(status.running + status.waiting - len(self._attempts), 0)
        ours = sum(attempt.kv_tokens for attempt in self._attempts.values())
        self._foreign_tokens = max(status.kv_pages_used * self._page_size - ours, 0)
        self._detail = wire.detail(status)
        if status.state == pb.STATE_READY and self._model is None:
            self._unlearnt.set()
        if before is None or before.state != status.state or before.incarnation != status.incarnation:
            self._changed()

    def _start_incarnation(self, incarnation: str) -> None:
        """Drops what was learnt about the one before; its requests are gone, reported or not."""
        for handle in self._attempts:
            self._outbox.put_nowait(wire.cancel_frame(handle))
        self._lose_attempts("the worker's engine was started anew")
        self._prefixes.drop(self._incarnation)
        self._prefixes.add(incarnation, self.address)
        self._incarnation = incarnation
        self._model = None
        self._health = self._health.restarted()

    def _detach(self, why: str) -> None:
        announced = self._retiring or self._state is WorkerState.DRAINING
        self._status = None
        self._state = WorkerState.UNREACHABLE
        self._model = None
        self._detail = why
        self._foreign_load = self._foreign_tokens = 0
        self._unlearnt.clear()
        self._lose_attempts(f"the stream to worker {self.address} was lost ({why})", announced=announced)
        self._changed()

    def _lose_attempts(self, message: str, *, announced: bool = False) -> None:
        """The worker or its engine is gone, and did not say which request is to blame.

        That counts against the worker if it had requests, and against them, unless it was `announced`.
        """
        if self._attempts and not announced:
            self._lost()
        in_step = False if announced else None
        failure = Failure(self.address, self._incarnation, Reason.ENGINE_DEAD, message, in_step=in_step)
        for attempt in self._attempts.values():
            attempt.fail(failure)
        self._attempts.clear()

    def _lost(self) -> None:
        """A death with requests, of the engine or of a step of it."""
        self._health = self._health.lost(time.monotonic())
        if self._health.on_trial:
            self._ejections.inc()
            self._changed()

    def _stand(self) -> None:
        """Called whenever a part of it may have changed."""
        standing = self.standing
        standing.in_flight = len(self._attempts)
        standing.load = self._foreign_load + standing.in_flight
        standing.max_running = self._status.max_running or 1 if self._status is not None else 1
        standing.max_model_len = self._model.max_model_len if self._model is not None else 0
        standing.on_trial = self._health.on_trial

    def _changed(self) -> None:
        self._stand()
        self._tell(self)

    def _cancel(self, handle: int) -> None:
        if self._forget(handle) is not None:
            self._outbox.put_nowait(wire.cancel_frame(handle))

    def _forget(self, handle: int) -> Attempt | None:
        attempt = self._attempts.pop(handle, None)
        self._stand()
        if attempt is not None and self._health.on_trial:
            # The next one may try.
            self._changed()
        return attempt


def _has_begun(addressed: tuple[Attempt, pb.Delta]) -> bool:
    return addressed[0].begun
