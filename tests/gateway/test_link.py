"""The connection to a worker: what is learnt, what is dropped, how silence and restarts are met."""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from moebius_gateway.journal import Record, Submission
from moebius_gateway.types import GenerationError, ModelInfo, Reason, Sampling, Tokens
from moebius_gateway.workers import wire
from moebius_gateway.workers.attempt import Attempt
from moebius_gateway.workers.catalog import MAX_UNSERVED, Catalog
from moebius_gateway.workers.dispatcher import DispatcherOptions
from moebius_gateway.workers.link import Link, LinkLostError
from moebius_gateway.workers.routing import prefix_blocks
from moebius_gateway.workers.view import WorkerState
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.dispatching import MODEL, Gateway, Seen, cluster, consume, gateway, generation
from tests.gateway.worker_standin import Plan, StandIn, serving, undisturbed
from tests.waiting import until

FILES = (("tokenizer.json", b"{}" * 100_000), ("chat_template.jinja", b"{{ messages }}"))
LONG = tuple(range(3, 203))


async def test_a_worker_is_learnt_with_its_tokenizer() -> None:
    async with cluster(1, Plan(tokenizer=FILES, tokenizer_hash="abc")) as it:
        (info,) = it.gateway.models()
        assert (info.id, info.tokenizer_hash, info.max_model_len) == ("standin", "abc", 4096)
        assert it.gateway.model("standin") == info
        assert it.gateway.model("another") is None
        assert it.gateway.tokenizer_files(info) == dict(FILES)
        assert it.gateway.ready()
        assert it.gateway.ready("standin")
        assert not it.gateway.ready("another")


async def test_series_exist_before_anything_happened() -> None:
    async with gateway(1) as built:
        address = "127.0.0.1:1"
        for name in ("worker_up", "worker_streams", "ejections_total", "attach_reconnects_total"):
            assert built.metric(name, worker=address) == 0
        assert built.metric("workers", state="UNREACHABLE") == 1
        assert built.metric("workers", state="READY") == 0
        for name in ("streams_waiting", "strikes_total", "poisoned_total"):
            assert built.metric(name) == 0
        assert built.metric("migrations_total", reason="ENGINE_DEAD", outcome="resumed") == 0


@pytest.mark.timed
async def test_a_stream_that_is_lost_while_the_gateway_stops_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def lost_when_cancelled(link: Link, call: object) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise LinkLostError("the worker died in that moment") from None

    async with serving(StandIn(Plan())) as port:
        monkeypatch.setattr(Link, "_read", lost_when_cancelled)
        async with asyncio.timeout(5):
            async with gateway(port):
                # Time for the link to get as far as reading.
                await asyncio.sleep(0.2)


@pytest.mark.timed
async def test_a_worker_that_comes_back_on_its_address_rejoins_soon() -> None:
    async with gateway(0) as nobody:
        assert not nobody.ready()
    first = StandIn(Plan(), name="first")
    async with serving(first) as port:
        pass
    async with gateway(port) as built:
        await until(lambda: built.workers()[0].detail != "not attached yet")
        async with serving(first, port):
            await until(built.ready)
        await until(lambda: not built.ready())
        assert built.workers()[0].state is WorkerState.UNREACHABLE
        assert [info.id for info in built.models()] == ["standin"]
        assert built.tokenizer_files(built.models()[0])
        await asyncio.sleep(0.5)
        async with serving(StandIn(Plan(), name="second"), port):
            await until(built.ready, seconds=5)
            assert built.workers()[0].incarnation == "second-1"
            assert built.metric("attach_reconnects_total", worker=f"127.0.0.1:{port}") == 1
            assert built.metric("worker_up", worker=f"127.0.0.1:{port}") == 1


@pytest.mark.timed
async def test_a_silent_worker_is_dead_and_is_welcome_when_it_speaks_again() -> None:
    async with cluster(1, Plan(beat=0.05), silence_timeout=0.6) as it:
        (worker,) = it.workers
        # Its heartbeat is enough: an idle link lives.
        await asyncio.sleep(0.9)
        assert it.gateway.metric("attach_reconnects_total", worker=f"127.0.0.1:{it.ports[0]}") == 0
        worker.silent = True
        await until(lambda: not it.gateway.ready(), seconds=DispatcherOptions().silence_timeout)
        assert "nothing heard" in it.gateway.workers()[0].detail
        worker.silent = False
        await until(it.gateway.ready)


@pytest.mark.timed
async def test_a_gateway_that_was_itself_stopped_does_not_blame_its_workers() -> None:
    async with cluster(1, Plan(beat=0.05), silence_timeout=0.5) as it:
        time.sleep(1.0)  # noqa: ASYNC251
        await asyncio.sleep(0.7)
        assert it.gateway.ready()
        assert it.gateway.metric("attach_reconnects_total", worker=f"127.0.0.1:{it.ports[0]}") == 0


class Mute(StandIn):
    """Is ready, but does not say for what."""

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.Model:  # noqa: N802
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_worker_that_does_not_say_what_it_serves_holds_up_no_other() -> None:
    async with (
        serving(Mute(Plan(), "mute")) as mute,
        serving(StandIn(Plan(), "other")) as other,
        gateway(mute, other, silence_timeout=300) as built,
    ):
        await until(built.ready)
        assert [view.address for view in built.ready_workers("standin")] == [f"127.0.0.1:{other}"]


async def test_a_frame_that_makes_no_sense_costs_the_stream_and_not_the_worker() -> None:
    async with cluster(1, Plan(rate=50)) as it:
        seen = Seen()
        task = asyncio.create_task(consume(it.gateway, generation(max_tokens=30), seen))
        await until(lambda: len(seen.tokens) > 5)
        odd = pb.TokenLogprobs(logprob=-1, top_token_ids=[1, 2], top_logprobs=[-1])
        it.workers[0].send(pb.Delta(handle=it.workers[0].running[0].handle, token_ids=[9], logprobs=[odd]))
        await task
        assert tuple(seen.tokens) == undisturbed((5, 6, 7), 1, 30)
        assert it.gateway.metric("attach_reconnects_total", worker=f"127.0.0.1:{it.ports[0]}") == 1


class Fickle(StandIn):
    """Ends every stream with its first frame."""

    attaches = 0

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.GatewayFrame], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerFrame]:
        self.attaches += 1
        yield pb.WorkerFrame(status=self.status())


@pytest.mark.timed
async def test_a_worker_that_attaches_only_to_fail_is_tried_with_growing_pauses() -> None:
    worker = Fickle(Plan())
    async with serving(worker) as port, gateway(port, reconnect_pause=0.4):
        await asyncio.sleep(1.0)
        await until(lambda: worker.attaches >= 2)
    # With the pauses of a worker that was lost after good times they would be twenty and more.
    assert worker.attaches <= 9


@pytest.mark.parametrize(
    ("state", "seen"), [(pb.STATE_DRAINING, WorkerState.DRAINING), (pb.STATE_FAILED, WorkerState.FAILED)]
)
async def test_a_change_of_state_is_seen_at_once(state: int, seen: WorkerState) -> None:
    async with cluster(1) as it:
        it.workers[0].become(state)
        await until(lambda: it.gateway.workers()[0].state is seen)
        assert not it.gateway.ready()
        assert it.gateway.metric("workers", state=seen.value) == 1
        it.workers[0].become(pb.STATE_READY)
        await until(it.gateway.ready)


async def test_a_new_incarnation_starts_with_a_clean_slate() -> None:
    async with cluster(1) as it:
        known, blocks = it.gateway._prefixes, prefix_blocks(LONG, "standin")
        await consume(it.gateway, generation(LONG))
        assert known.match(blocks) == {f"127.0.0.1:{it.ports[0]}": len(blocks)}
        it.workers[0].restart()
        await until(lambda: it.gateway.workers()[0].incarnation == "w0-2")
        assert known.match(blocks) == {}
        await until(it.gateway.ready)


async def test_a_restart_that_fails_no_request_by_name_moves_them_all_the_same() -> None:
    async with cluster(1, Plan(rate=50)) as it:
        seen = Seen()
        task = asyncio.create_task(consume(it.gateway, generation(max_tokens=30), seen))
        await until(lambda: len(seen.tokens) > 5)
        it.workers[0].restart()
        await task
        assert tuple(seen.tokens) == undisturbed((5, 6, 7), 1, 30)


async def test_stale_frames_find_nobody() -> None:
    async with cluster(2, Plan(rate=50)) as it:
        seen = Seen()
        task = asyncio.create_task(consume(it.gateway, generation(max_tokens=30), seen))
        await until(lambda: len(seen.tokens) > 5)
        worker = it.busy()
        stale = worker.running[0].handle
        await worker.die()
        other = it.busy()
        for source in (worker, other):
            source.send(pb.Delta(handle=stale, token_ids=[99, 99]), pb.Delta(handle=10**6, token_ids=[99]))
            source.send(pb.Delta(handle=stale, token_ids=[99], finish_reason=pb.FINISH_REASON_STOP))
        await task
        assert tuple(seen.tokens) == undisturbed((5, 6, 7), 1, 30)
        assert it.gateway.idle()


async def test_a_first_token_is_passed_on_before_the_others_of_its_step() -> None:
    # Not started: that nobody is there would end them all.
    built = Gateway(DispatcherOptions(workers=("127.0.0.1:1",)))
    [link] = built._links.values()
    order: list[int] = []

    async def read(attempt: Attempt) -> None:
        while isinstance(await attempt.next(), Tokens):
            order.append(attempt.handle)

    submissions = [Record(generation(), MODEL).submit(handle, 0.0) for handle in range(1, 5)]
    attempts = [link.submit(submission, (), time.monotonic() + 20) for submission in submissions]
    reading = [asyncio.create_task(read(attempt)) for attempt in attempts]
    for handles in ([1, 3], [1, 2, 3, 4], [1, 2, 3, 4]):
        await asyncio.sleep(0)
        link._take(pb.WorkerFrame(deltas=[pb.Delta(handle=h, token_ids=[5]) for h in handles]))
        await asyncio.sleep(0)
    assert order == [1, 3, 2, 4, 1, 3, 1, 2, 3, 4]
    for task in reading:
        task.cancel()


async def test_an_unattached_worker_is_no_reason_to_hang() -> None:
    async with gateway(1) as built:
        assert not built.ready()
        with pytest.raises(GenerationError) as failed:
            await consume(built, generation())
        assert failed.value.reason is Reason.NOT_READY


# ---- the catalogue and the wire, without a worker --------------------------------------------------------


def info(model_id: str = "m", tokenizer: str = "t", length: int = 100) -> ModelInfo:
    return ModelInfo(model_id, "A", tokenizer, length, 10, (), 0)


def test_during_a_rollout_the_older_model_stays_until_nobody_serves_it() -> None:
    catalog = Catalog()
    catalog.update([info(tokenizer="old")])
    catalog.update([info(tokenizer="new"), info(tokenizer="old")])
    assert catalog.model("m") == info(tokenizer="old")
    catalog.update([])
    assert catalog.model("m") == info(tokenizer="old")
    catalog.update([info(tokenizer="new")])
    assert catalog.model("m") == info(tokenizer="new")


def test_a_model_has_the_least_context_of_its_workers() -> None:
    catalog = Catalog()
    catalog.update([info(length=100), info(length=60), info(tokenizer="another", length=10)])
    assert catalog.model("m") == info(length=60)
    catalog.update([info(length=100)])
    assert catalog.model("m") == info(length=100)


async def test_what_nobody_serves_is_forgotten_in_the_end() -> None:
    async def read() -> dict[str, bytes]:
        return {"tokenizer.json": b"{}"}

    catalog = Catalog()
    for number in range(3 * MAX_UNSERVED):
        one = info(f"m{number}", tokenizer=f"t{number}")
        await catalog.fetch(one.tokenizer_hash, read)
        catalog.update([one])
    catalog.update([])
    assert len(catalog.models()) == MAX_UNSERVED
    assert catalog.files(one) == {"tokenizer.json": b"{}"}
    with pytest.raises(GenerationError):
        catalog.files(info("m0", tokenizer="t0"))


async def test_one_tokenizer_is_read_once_for_many_workers() -> None:
    reads = 0

    async def read() -> dict[str, bytes]:
        nonlocal reads
        reads += 1
        await asyncio.sleep(0)
        return {}

    catalog = Catalog()
    await asyncio.gather(*(catalog.fetch("t", read) for _ in range(5)))
    assert reads == 1


def test_what_a_newer_worker_says_is_taken_for_the_next_best() -> None:
    error = pb.Error(message="new")
    error.reason = 99  # type: ignore[assignment]
    assert wire.failure(error, "a", "1").reason is Reason.ENGINE_DEAD
    delta = pb.Delta(token_ids=[1])
    delta.finish_reason = 99  # type: ignore[assignment]
    assert wire.tokens(delta).finish_reason is not None
    status = pb.Status()
    status.state = 99  # type: ignore[assignment]
    assert wire.state(status) is WorkerState.LOADING


def test_all_sampling_fields_travel() -> None:
    sampling = Sampling(0.5, 4, 0.75, 0.25, 1.5, 0.125, -0.5, 2**64 - 1, {7: -100.0}, 0)
    submit = wire.submit_frame(Submission(1, "id", (5, 6, 10), 1, sampling, 9, 2, (2,), True)).submit
    for name in Sampling.__dataclass_fields__:
        assert getattr(submit.sampling, name) == getattr(sampling, name), name
    assert submit.sampling.HasField("logprobs")
    assert (submit.resumed, submit.max_tokens, submit.min_tokens) == (1, 9, 2)
    assert list(submit.token_ids) == [5, 6, 10]
    assert list(submit.stop_token_ids) == [2]
    assert submit.quarantined
