"""Probes are answered from memory and say why not."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import pytest

from moebius_gateway.text import registry
from moebius_gateway.text.errors import TextError
from moebius_gateway.text.model import TextModel
from moebius_gateway.text.registry import TextModels
from moebius_gateway.types import ModelInfo
from tests.gateway.http_server import (
    MODEL,
    Gateway,
    ScriptedBackend,
    running_gateway,
    tokenizer_files,
    until_ready,
)
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_alive_whatever_the_workers_do(gateway: Gateway) -> None:
    gateway.backend.is_ready = False
    async with gateway.client() as client:
        response = await client.get("/livez")
    assert (response.status_code, response.json()) == (200, {"status": "alive"})


async def test_ready_with_a_worker_and_not_without(gateway: Gateway) -> None:
    async with gateway.client() as client:
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"], ready.json()["models"]) == (
            200,
            "ready",
            [MODEL.id],
        )
        gateway.backend.is_ready = False
        not_ready = await client.get("/readyz")
    assert not_ready.status_code == 503
    assert not_ready.json() == {
        "status": "not ready",
        "models": [],
        "reasons": ["org/tiny: none of its workers is ready"],
    }


async def test_requests_are_accepted_as_long_as_a_model_is_known(gateway: Gateway) -> None:
    async with gateway.client() as client:
        for gateway.backend.is_ready in (True, False):
            assert (await client.get("/accepting")).json() == {"status": "accepting"}
    async with running_gateway(ScriptedBackend()) as other, other.client() as client:
        await until_ready(other)
        other.lifecycle.draining = True
        stopping = await client.get("/accepting")
        assert (stopping.status_code, stopping.json()) == (503, {"status": "not accepting"})
    async with running_gateway(ScriptedBackend(known=[])) as empty, empty.client() as client:
        assert (await client.get("/accepting")).status_code == 503


async def test_not_ready_before_any_worker_has_spoken() -> None:
    async with running_gateway(ScriptedBackend(known=[])) as gateway, gateway.client() as client:
        response = await client.get("/readyz")
        assert response.status_code == 503
        assert response.json()["reasons"] == ["no worker has said yet what it serves"]


async def test_a_model_that_is_not_known_yet_is_no_reason_to_give_up() -> None:
    async with running_gateway(ScriptedBackend(known=[])) as gateway, gateway.client() as client:
        response = await client.post("/v1/completions", json={"model": MODEL.id, "prompt": "x"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "not_ready"
    assert int(response.headers["retry-after"]) >= 1


async def test_not_ready_before_the_tokenizer_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it can be loaded at all is not known until then."""
    may_load = threading.Event()

    def slow(files: Mapping[str, bytes], family: str | None) -> TextModel:
        assert may_load.wait(PATIENCE)
        return TextModel(files)

    monkeypatch.setattr(registry, "_text_model", slow)
    async with running_gateway(ScriptedBackend()) as gateway, gateway.client() as client:
        response = await client.get("/readyz")
        may_load.set()
        assert response.status_code == 503
        assert response.json()["reasons"] == ["org/tiny: its tokenizer is being loaded"]
        await until_ready(gateway)


async def test_a_broken_tokenizer_is_said_and_a_mended_one_serves() -> None:
    backend = ScriptedBackend()
    backend.files = backend.files | {"tokenizer.json": b"{"}
    chat = {"model": MODEL.id, "messages": [{"role": "user", "content": "Hi"}]}
    async with running_gateway(backend) as gateway, gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=chat)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "tokenizer_unusable")
        ready = await client.get("/readyz")
        assert ready.status_code == 503
        assert "tokenizer.json cannot be loaded" in ready.json()["reasons"][0]
        backend.files = tokenizer_files()
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert (await client.get("/readyz")).status_code == 200


async def test_text_models_are_loaded_before_the_first_request() -> None:
    backend = ScriptedBackend()
    asked = 0

    class Counting(ScriptedBackend):
        def tokenizer_files(self, info: object) -> dict[str, bytes]:
            nonlocal asked
            asked += 1
            return backend.files

    async with running_gateway(Counting(files=backend.files)) as gateway, gateway.client() as client:
        await until(lambda: asked == 1)
        await client.post("/v1/completions", json={"model": MODEL.id, "prompt": "x"})
        assert asked == 1


async def test_requests_share_the_loading_of_a_text_model() -> None:
    asked, content = 0, tokenizer_files()

    def files(info: object) -> dict[str, bytes]:
        nonlocal asked
        asked += 1
        return content

    texts = TextModels(files)
    waiting = [asyncio.create_task(texts.get(replace(MODEL, id=name))) for name in ("one", "two", "three")]
    await asyncio.sleep(0)  # all wait now, before the load has begun
    waiting[0].cancel()
    one, two, three = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(one, asyncio.CancelledError)
    assert two is three
    assert asked == 1


async def test_a_failed_load_is_tried_again() -> None:
    files: dict[str, bytes] = {}
    texts = TextModels(lambda _: files)
    with pytest.raises(TextError):
        await texts.get(MODEL)
    assert "tokenizer.json is missing" in (texts.failure(MODEL) or "")
    files |= tokenizer_files()
    assert await texts.get(MODEL)
    assert texts.failure(MODEL) is None


@contextlib.asynccontextmanager
async def kept_loaded(texts: TextModels, models: list[ModelInfo]) -> AsyncIterator[None]:
    keeping = asyncio.create_task(texts.keep_loaded(lambda: models, 0.01))
    try:
        yield
        assert not keeping.done(), "it gave up"
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.parametrize("config", [b'{"chat_template": [{"foo": 1}]}', b'{"chat_template": 7}'])
async def test_files_that_nobody_expects_stop_neither_their_model_nor_others(config: bytes) -> None:
    files = tokenizer_files() | {"tokenizer_config.json": config}
    other = replace(MODEL, id="other", tokenizer_hash="other")
    texts = TextModels(lambda info: files if info is MODEL else tokenizer_files())
    async with kept_loaded(texts, [MODEL, other]):
        await until(lambda: texts.failure(MODEL))
        assert "the tokenizer's files cannot be used" in (texts.failure(MODEL) or "")
        with pytest.raises(TextError):
            await texts.get(MODEL)
        assert await texts.get(other)
        files |= {"tokenizer_config.json": b"{}"}
        await until(lambda: texts.failure(MODEL) is None)


async def test_what_no_model_needs_is_forgotten() -> None:
    broken = replace(MODEL, id="broken", tokenizer_hash="broken")
    asked: list[str] = []

    def files(info: ModelInfo) -> dict[str, bytes]:
        asked.append(info.id)
        return {} if info is broken else tokenizer_files()

    texts, models = TextModels(files), [MODEL, broken]
    async with kept_loaded(texts, models):
        await until(lambda: texts.failure(broken))
        assert asked.count(MODEL.id) == 1
        models.clear()
        await until(lambda: texts.failure(broken) is None)
        models.append(MODEL)
        await until(lambda: asked.count(MODEL.id) == 2)
