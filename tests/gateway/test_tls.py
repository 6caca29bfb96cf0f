"""TLS on both sides of the gateway, and certificates that are exchanged while it runs."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest

from moebius_gateway import chunk_writer
from moebius_gateway import tls as server_tls
from moebius_gateway.http_protocol import bounded
from moebius_gateway.server import Server, listen
from moebius_gateway.tls import ServerTls
from moebius_proto.channel import WorkerTls
from moebius_proto.worker.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from moebius_worker.front.tls import server_credentials
from moebius_worker.settings import WorkerTls as WorkerSide
from tests.certificates import Certificate, authority, signed
from tests.gateway.dispatching import Gateway, consume, gateway, generation
from tests.gateway.worker_standin import Plan, StandIn, undisturbed
from tests.ports import free_port
from tests.waiting import until


async def hello(scope: dict, receive: object, send: object) -> None:  # type: ignore[type-arg]
    """Says its scheme, the way that streams take."""
    await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
    chunks = scope[chunk_writer.KEY]
    assert chunks.write(scope["scheme"].encode())
    chunks.flush()
    await send({"type": "http.response.body"})  # type: ignore[operator]


@asynccontextmanager
async def https(certificate: Certificate) -> AsyncIterator[str]:
    tls = ServerTls(certificate.cert, certificate.key)
    keeping = asyncio.create_task(tls.keep_current())
    server = Server(hello, bounded(10_000, 100), tls.context)  # type: ignore[arg-type]
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        await until(lambda: server.started)
        yield f"https://localhost:{listener.getsockname()[1]}"
        assert not keeping.done()
        server.should_exit = True
        await serving
        keeping.cancel()


async def get(url: str, ca: Certificate) -> str | None:
    """None if the certificate is not of this authority."""
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(ca.cert))) as client:
        try:
            return (await client.get(url)).text
        except httpx.ConnectError:
            return None


def replace(old: Certificate, new: Certificate) -> None:
    shutil.copy(new.cert, old.cert)
    shutil.copy(new.key, old.key)


async def test_clients_see_the_certificate_that_is_in_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tls, "LOOK_SECONDS", 0.02)
    first, second = authority(tmp_path, "first"), authority(tmp_path, "second")
    used = signed(tmp_path, first, "used")
    async with https(used) as url:
        assert await get(url, first) == "https"
        assert await get(url, second) is None
        # Half of a new pair: the old one stays.
        shutil.copy(signed(tmp_path, second, "other").cert, used.cert)
        await asyncio.sleep(0.1)
        assert await get(url, first) == "https"
        replace(used, signed(tmp_path, second, "new"))
        await until(lambda: get(url, second))
        assert await get(url, first) is None


@asynccontextmanager
async def worker(worker_tls: WorkerSide) -> AsyncIterator[int]:
    standin, server, port = StandIn(Plan()), grpc.aio.server(), free_port()
    add_WorkerServicer_to_server(standin, server)
    server.add_secure_port(f"localhost:{port}", server_credentials(worker_tls))
    await server.start()
    engine = asyncio.create_task(standin.run())
    try:
        yield port
    finally:
        engine.cancel()
        with suppress(asyncio.CancelledError):
            await engine
        await server.stop(None)


async def attached(built: Gateway, seconds: float) -> bool:
    try:
        await until(built.ready, seconds=seconds)
    except AssertionError:
        return False
    return True


@pytest.mark.timed
async def test_workers_and_gateway_show_each_other_who_they_are(tmp_path: Path) -> None:
    ca, foreign = authority(tmp_path), authority(tmp_path, "foreign")
    theirs, ours = signed(tmp_path, ca, "worker", "worker.moebius"), signed(tmp_path, ca, "gateway")
    stranger = signed(tmp_path, foreign, "stranger")
    name = "worker.moebius"
    async with worker(WorkerSide(theirs.cert, theirs.key, ca.cert)) as port:
        async with gateway(port, tls=WorkerTls(ca.cert, ours.cert, ours.key, name)) as built:
            assert await attached(built, 10)
            seen = await consume(built, generation())
            assert tuple(seen.tokens) == undisturbed((5, 6, 7), 1, 20)
        for wrong in (
            None,
            WorkerTls(ca.cert, None, None, name),
            WorkerTls(ca.cert, stranger.cert, stranger.key, name),
            WorkerTls(foreign.cert, ours.cert, ours.key, name),
            WorkerTls(ca.cert, ours.cert, ours.key, "another.name"),
        ):
            async with gateway(port, tls=wrong) as built:
                assert not await attached(built, 0.7), wrong


@pytest.mark.timed
async def test_a_worker_s_certificate_is_exchanged_and_the_gateway_s_files_are_read_anew(
    tmp_path: Path,
) -> None:
    first, second = authority(tmp_path, "first"), authority(tmp_path, "second")
    used = signed(tmp_path, first, "used")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(second.cert, trusted)
    async with (
        worker(WorkerSide(used.cert, used.key)) as port,
        gateway(port, tls=WorkerTls(trusted, name="localhost")) as built,
    ):
        assert not await attached(built, 0.5)
        replace(used, signed(tmp_path, second, "new"))
        assert await attached(built, 10)


async def test_a_file_that_is_gone_is_said(tmp_path: Path) -> None:
    async with gateway(free_port(), tls=WorkerTls(tmp_path / "none.pem")) as built:
        await until(lambda: "none.pem" in built.workers()[0].detail)
