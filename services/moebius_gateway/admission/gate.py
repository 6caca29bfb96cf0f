"""The gate in front of the workers: who waits, who goes, who is refused. On one event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from moebius_gateway.admission import forecast
from moebius_gateway.admission.clients import Account, Accounts
from moebius_gateway.admission.fair_queue import Entry, FairQueue, Fit
from moebius_gateway.admission.forecast import Experience
from moebius_gateway.admission.limits import Client, GateOptions
from moebius_gateway.admission.metrics import AdmissionMetrics, label
from moebius_gateway.admission.room import Room, room
from moebius_gateway.types import Generation, GenerationError, Reason
from moebius_gateway.workers.view import WorkerView

# Seconds after which it is looked anew at what the workers can take.
LOOK_SECONDS = 0.05
# What is said where nothing tells how long it will take, in seconds.
RETRY_AFTER = 2.0
RATE_LIMITED = "rate_limit_exceeded"


@dataclass(slots=True, eq=False)
class Place:
    """One sequence's, from its arrival on."""

    cost: int
    account: Account
    turn: asyncio.Future[None]
    began: float | None = None


@dataclass(slots=True)
class _Line:
    """One model's."""

    queue: FairQueue[Place] = field(default_factory=FairQueue)
    experience: Experience = field(default_factory=Experience)
    running: int = 0
    tokens: int = 0
    room: Room = field(default_factory=Room)
    looked: float = float("-inf")


class Gate:
    """Sequences of each model begin as there is room for them, in an order that is fair among clients."""

    def __init__(
        self,
        options: GateOptions,
        ready: Callable[[str], Sequence[WorkerView]],
        metrics: AdmissionMetrics,
    ) -> None:
        """`ready` tells the workers that can take requests for a model."""
        self._options = options
        self._ready = ready
        self._metrics = metrics
        self._accounts = Accounts()
        self._lines: dict[str, _Line] = {}
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None

    # ---- rates --------------------------------------------------------------------------------------

    def charge_request(self, client: Client) -> None:
        """Raises `GenerationError` if the client sends too many."""
        now = time.monotonic()
        account = self._accounts.of(client, now)
        self._metrics.client_requests.labels(client.name).inc()
        if account.requests is not None:
            self._check_rate("requests", account.requests.delay(1, now))
            account.requests = account.requests.taken(1, now)

    def charge_prompt(self, client: Client, tokens: int) -> None:
        """Raises `GenerationError` if the client used up its tokens; those generated come on top later."""
        now = time.monotonic()
        account = self._accounts.of(client, now)
        if account.tokens is not None:
            self._check_rate("tokens", account.tokens.delay(tokens, now))
            account.tokens = account.tokens.taken(tokens, now)
        self._metrics.client_tokens.labels(client.name, "prompt").inc(tokens)

    def _check_rate(self, of: str, delay: float) -> None:
        if delay > 0:
            self._metrics.refusals.labels(of).inc()
            message = f"This API key's limit of {of} a minute is reached: try again in {delay:.1f} s"
            raise GenerationError(
                Reason.OVERLOADED, message, retryable=True, retry_after=delay, code=RATE_LIMITED
            )

    # ---- places -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def place(self, generation: Generation) -> AsyncIterator[Place]:
        """Waits for the sequence's turn, and holds its place. Raises `GenerationError`."""
        line = self._line(generation.model)
        place = Place(
            line.experience.cost(len(generation.prompt_ids), generation.max_tokens),
            self._accounts.named(generation.client),
            asyncio.get_running_loop().create_future(),
        )
        try:
            await self._wait_for_turn(line, generation, place)
            yield place
        finally:
            if place.began is not None:
                self._leave(line, generation.model, place)

    def shared(self, generation: Generation, place: Place, tokens: int) -> None:
        """So many tokens of the prompt were in a worker's cache already: they take no more room there."""
        place.cost -= tokens
        self._lines[generation.model].tokens -= tokens

    def ended(self, generation: Generation, place: Place, generated: int) -> None:
        """The sequence came to its end: what was learnt of it helps to foresee others."""
        if place.began is not None:
            line = self._lines[generation.model]
            line.experience = line.experience.after(generated, time.monotonic() - place.began)

    def charge_output(self, generation: Generation, tokens: int) -> None:
        """Of a sequence that is over, however it ended."""
        account = self._accounts.named(generation.client)
        if account.tokens is not None:
            account.tokens = account.tokens.taken(tokens, time.monotonic())
        self._metrics.client_tokens.labels(generation.client, "generated").inc(tokens)

    def report(self) -> Mapping[str, object]:
        """For people: what waits, what runs, what is expected."""
        return {
            model: {
                "waiting": [
                    {"client": entry.client, "priority": label(entry.priority), "cost": entry.cost}
                    for entry in line.queue
                ],
                "running": line.running,
                "reserved_tokens": line.tokens,
                "room": {"sequences": line.room.sequences, "tokens": line.room.tokens},
                "expected": {"tokens": line.experience.length, "seconds": line.experience.seconds},
            }
            for model, line in self._lines.items()
        }

    def _line(self, model: str) -> _Line:
        if model not in self._lines:
            self._lines[model] = _Line()
            self._metrics.has_line(model)
        return self._lines[model]

    async def _wait_for_turn(self, line: _Line, generation: Generation, place: Place) -> None:
        entry = Entry(generation.client, generation.priority, place.cost, place)
        arrived = time.monotonic()
        line.queue.push(entry)
        self._pump(line, generation.model)
        waited = self._metrics.wait.labels(label(generation.priority))
        if place.began is not None:
            waited.observe(0.0)
            return
        try:
            self._make_room(line, entry, generation.deadline - arrived)
            self._waiting += 1
            try:
                waiting = self._metrics.waiting.labels(generation.model, label(generation.priority))
                with waiting.track_inprogress():
                    async with asyncio.timeout(generation.deadline - arrived):
                        await place.turn
            finally:
                self._waiting -= 1
        except TimeoutError:
            if place.began is None:
                raise self._refused("deadline", _too_late(line, generation.model)) from None
        finally:
            if place.began is None:
                with suppress(ValueError, KeyError):  # displaced: it is gone already
                    line.queue.remove(entry)
        waited.observe(time.monotonic() - arrived)

    def _make_room(self, line: _Line, entry: Entry[Place], patience: float) -> None:
        """Raises `GenerationError` if it had better not wait; may give up another for it."""
        waiting = dict(line.queue.waiting(entry.priority))
        own = waiting.pop(entry.client, 1) - 1
        expected = forecast.wait(
            forecast.ahead(own, waiting.values()), 0 if line.room.none else line.running, line.experience
        )
        account = entry.item.account
        if account.full and account.limits.max_concurrent:
            alone = forecast.wait(own, account.limits.max_concurrent, line.experience)
            expected = max(expected, alone)
        if expected > min(self._options.max_wait, patience):
            message = f"A place is expected to be free in {expected:.0f} s only: try again later"
            raise self._refused("forecast", _overloaded(message, expected))
        if self._waiting < self._options.max_waiting:
            return
        message = f"{self._waiting} requests are waiting already: try again later"
        error = _overloaded(message, expected or RETRY_AFTER)
        least, count = line.queue.least()
        if least.priority <= entry.priority and count <= own + 1:
            raise self._refused("full", error)
        line.queue.remove(least)
        if not least.item.turn.done():
            least.item.turn.set_exception(self._refused("displaced", error))

    def _refused(self, why: str, error: GenerationError) -> GenerationError:
        self._metrics.refusals.labels(why).inc()
        return error

    def _pump(self, line: _Line, model: str) -> None:
        """Lets all go whose turn it is."""
        now = time.monotonic()
        if now - line.looked >= LOOK_SECONDS or line.room.none:
            line.room, line.looked = room(self._ready(model)), now
            self._metrics.room.labels(model).set(line.room.tokens or 0)

        def fit(entry: Entry[Place]) -> Fit:
            if entry.item.account.full:
                return Fit.CLIENT_FULL
            fits = line.room.fits(line.running, line.tokens, entry.item.cost)
            return Fit.YES if fits else Fit.TOO_LARGE

        while (entry := line.queue.pop(fit)) is not None:
            if not entry.item.turn.done():  # its client has left else
                self._enter(line, entry.item, now)
        self._show(line, model)
        if len(line.queue) and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        for model, line in self._lines.items():
            if len(line.queue):
                self._pump(line, model)

    def _enter(self, line: _Line, place: Place, now: float) -> None:
        place.began = now
        place.turn.set_result(None)
        line.running += 1
        line.tokens += place.cost
        place.account.running += 1

    def _leave(self, line: _Line, model: str, place: Place) -> None:
        line.running -= 1
        line.tokens -= place.cost
        place.account.running -= 1
        self._pump(line, model)

    def _show(self, line: _Line, model: str) -> None:
        self._metrics.running.labels(model).set(line.running)
        self._metrics.reserved.labels(model).set(line.tokens)


def _overloaded(message: str, retry_after: float) -> GenerationError:
    return GenerationError(Reason.OVERLOADED, message, retryable=True, retry_after=retry_after)


def _too_late(line: _Line, model: str) -> GenerationError:
    if line.room.none:
        message = f"No worker of model {model!r} was ready before the deadline"
        return GenerationError(Reason.NOT_READY, message, retryable=True, retry_after=RETRY_AFTER)
    return _overloaded(f"Model {model!r} was overloaded until the deadline", RETRY_AFTER)
