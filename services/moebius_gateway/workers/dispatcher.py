"""Runs generations on workers, and keeps them running: place, stream, and on failure place again."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import structlog

from moebius_gateway import recovery
from moebius_gateway.journal import DEATHS, Failure, Record
from moebius_gateway.types import Generation, GenerationError, ModelInfo, Reason, Tokens
from moebius_gateway.workers import routing
from moebius_gateway.workers.catalog import Catalog
from moebius_gateway.workers.fleet import Fleet
from moebius_gateway.workers.link import Link, LinkOptions
from moebius_gateway.workers.losses import Losses
from moebius_gateway.workers.member import Member
from moebius_gateway.workers.metrics import REJOINED, DispatcherMetrics
from moebius_gateway.workers.prefix_index import PrefixIndex
from moebius_gateway.workers.roster import Roster
from moebius_gateway.workers.view import WorkerState, WorkerView
from moebius_proto.channel import WorkerTls, keep_grpc

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DispatcherOptions:
    """Durations are in seconds."""

    # host:port of each that is there from the start.
    workers: tuple[str, ...] = ()
    gateway_id: str = "gateway"
    # Without a frame for so long, a worker counts as dead.
    silence_timeout: float = 5.0
    # Generations that may wait for a worker; those that lost theirs always may.
    max_waiting: int = 1024
    # For so long full workers may put off a generation that none has taken yet; then it is refused.
    max_wait: float = 60.0
    # The longest pause between two tries to attach to a worker.
    reconnect_pause: float = 1.0
    # None: workers are spoken to without TLS.
    tls: WorkerTls | None = None


class Dispatcher:
    """The gateway's worker side, on one event loop. All but `stop` and `stream` answer from memory."""

    def __init__(self, options: DispatcherOptions, metrics: DispatcherMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._catalog = Catalog()
        self._change = asyncio.Event()
        self._waiting = 0
        # Never reused, on any link: what still comes for an old attempt finds nobody.
        self._handles = itertools.count(1)
        self._stopping = False
        self._fleet = Fleet()
        self._prefixes = PrefixIndex()
        self._link_options = LinkOptions(
            options.gateway_id, options.silence_timeout, options.reconnect_pause, options.tls
        )
        # As they are counted in the metrics.
        self._states: dict[Link, WorkerState] = {}
        self._roster = Roster(self._open, self._closed)
        self._links = self._roster.links
        self.set_workers(Member(address, address) for address in options.workers)

    async def start(self) -> None:
        """Begins to attach; returns at once."""
        keep_grpc()
        self._roster.start()

    async def stop(self) -> None:
        """Ends the streams to all workers, which cancels what runs there; generations fail as NOT_READY."""
        self._stopping = True
        await self._roster.stop()
        self._wake()

    def set_workers(self, members: Iterable[Member]) -> None:
        """From now on these are the workers: new ones are attached, and what runs on those that are none any
        more goes on elsewhere."""
        self._roster.apply(members)

    def models(self) -> list[ModelInfo]:
        return self._catalog.models()

    def model(self, model_id: str) -> ModelInfo | None:
        """None if no worker was ever seen to serve it."""
        return self._catalog.model(model_id)

    def tokenizer_files(self, info: ModelInfo) -> dict[str, bytes]:
        """Name to content. Raises GenerationError if they were forgotten (no worker has them any more)."""
        return self._catalog.files(info)

    def workers(self) -> list[WorkerView]:
        return [link.view() for link in self._links.values()]

    def ready(self, model_id: str | None = None) -> bool:
        """Whether a worker can take requests for this model, or for any."""
        models = [info for info in self.models() if model_id in (None, info.id)]
        return any(self._fleet.ready(info) for info in models)

    def ready_workers(self, model_id: str) -> list[WorkerView]:
        """Those that can take requests for the model."""
        info = self._catalog.model(model_id)
        return self._ready_views(info) if info is not None else []

    async def stream(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        """Yields the generation's tokens; the last piece has a finish reason.

        Closing it (or cancelling the task that iterates) cancels at the worker. Raises GenerationError.
        """
        record = Record(generation, self._known_model(generation), self._options.max_wait)
        blocks = routing.prefix_blocks(generation.prompt_ids, generation.model)
        failure: Failure | None = None
        with Losses(self._metrics) as losses:
            while True:
                link = await self._place(record, failure, blocks)
                if record.displaced:
                    self._metrics.replayed.inc(record.length)
                submission = record.submit(next(self._handles), time.monotonic())
                try:
                    with link.submit(
                        submission, blocks, generation.deadline, suspect=record.strikes > 0
                    ) as attempt:
                        while isinstance(got := await attempt.next(), Tokens):
                            tokens = record.deliver(got)
                            losses.delivered()
                            yield tokens
                            if tokens.finish_reason is not None:
                                return
                            if record.may_rejoin():
                                break
                except TimeoutError:
                    raise recovery.too_late(record) from None
                if isinstance(got, Tokens):
                    failure = None
                    losses.lost(REJOINED)
                    continue
                failure = got
                self._note(record, failure)
                if failure.reason in DEATHS or len(record.delivered) > submission.resumed:
                    losses.lost(failure.reason)
                if (finish_reason := record.finish_reason()) is not None:
                    losses.delivered()
                    yield Tokens((), finish_reason=finish_reason)
                    return

    def _known_model(self, generation: Generation) -> ModelInfo:
        info = self._catalog.model(generation.model)
        if info is None:
            message = f"No worker was ever seen to serve model {generation.model!r}"
            raise GenerationError(Reason.NOT_READY, message, retryable=True, retry_after=recovery.RETRY_AFTER)
        return info

    async def _place(self, record: Record, failure: Failure | None, blocks: Sequence[int]) -> Link:
        """The link on which to submit now. Waits for a worker if need be; raises GenerationError."""
        choice = self._choose(record, failure, blocks)
        if isinstance(choice, recovery.Wait):
            with self._waiting_room(record):
                while isinstance(choice, recovery.Wait):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(choice.until - time.monotonic()):
                            await self._change.wait()
                    choice = self._choose(record, failure, blocks)
        if isinstance(choice, recovery.Fail):
            if choice.error.reason is Reason.POISONED:
                self._metrics.poisoned.inc()
            raise choice.error
        return choice

    def _choose(
        self, record: Record, failure: Failure | None, blocks: Sequence[int]
    ) -> Link | recovery.Wait | recovery.Fail:
        begun = time.perf_counter()
        choice = self._decide(record, failure, self._prefixes.match(blocks), time.monotonic())
        self._metrics.routing.observe(time.perf_counter() - begun)
        return self._links[choice] if isinstance(choice, str) else choice

    def _decide(
        self, record: Record, failure: Failure | None, matched: Mapping[str, int], now: float
    ) -> str | recovery.Wait | recovery.Fail:
        """An address, unless it waits or fails. `matched`: by address, who has how much of its prefix."""
        if self._stopping:
            error = GenerationError(Reason.NOT_READY, "The gateway is stopping", retryable=True)
            return recovery.Fail(error)
        if fail := recovery.foregone(record, failure, now):
            return fail
        # Those that did nothing to it are alike to it, and none is better: a few of them tell as much as all.
        length, marks, links = record.length, record.marks, self._links
        some = [
            worker
            for worker in self._fleet.candidates(record.model, matched)
            if length < worker.max_model_len
            and worker.address not in marks
            and (not worker.on_trial or links[worker.address].view().admits(now))
        ]
        if some:
            return routing.pick(some, matched)
        decision = recovery.decide(record, failure, self._ready_views(record.model), now)
        if isinstance(decision, recovery.Place):
            return routing.pick([links[view.address].standing for view in decision.workers], matched)
        return decision

    def _ready_views(self, model: ModelInfo) -> list[WorkerView]:
        return [self._links[worker.address].view() for worker in self._fleet.ready(model)]

    @contextmanager
    def _waiting_room(self, record: Record) -> Iterator[None]:
        """A place among those that wait for a worker. Bounded, but never closed to those that lost theirs."""
        if self._waiting >= self._options.max_waiting and not record.displaced:
            message = f"{self._waiting} requests are waiting for a worker already"
            raise GenerationError(
                Reason.OVERLOADED, message, retryable=True, retry_after=recovery.RETRY_AFTER
            )
        self._waiting += 1
        try:
            with self._metrics.waiting.track_inprogress():
                yield
        finally:
            self._waiting -= 1

    def _note(self, record: Record, failure: Failure) -> None:
        if record.note(failure, time.monotonic()):
            self._metrics.strikes.inc()
        if failure.tokens_sent not in (None, len(record.delivered)):
            log.error(
                "the worker sent other tokens than were delivered",
                request_id=record.generation.request_id,
                worker=failure.worker,
                sent=failure.tokens_sent,
                delivered=len(record.delivered),
            )
        log.info(
            "attempt failed",
            request_id=record.generation.request_id,
            worker=failure.worker,
            reason=failure.reason.value,
            message=failure.message,
            delivered=len(record.delivered),
            strikes=record.strikes,
        )

    def _changed(self, link: Link) -> None:
        """Something about a worker changed: take it in, and let all that wait decide again."""
        view = link.view()
        if self._fleet.update(link.standing, view):
            self._catalog.update(self._fleet.served())
        self._metrics.worker_changed(self._states[link], view)
        self._states[link] = view.state
        self._wake()

    def _open(self, member: Member) -> Link:
        self._metrics.add_worker(member.name)
        link = Link(member, self._link_options, self._catalog, self._prefixes, self._metrics, self._changed)
        self._states[link] = WorkerState.UNREACHABLE
        return link

    def _closed(self, link: Link) -> None:
        self._metrics.remove_worker(link.member.name, self._states.pop(link))

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()
