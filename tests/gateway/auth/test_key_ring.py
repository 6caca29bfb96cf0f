"""Keys that come, change and go while the gateway runs."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from moebius_gateway.admission.limits import Client, Priority
from moebius_gateway.auth import key_ring
from moebius_gateway.auth.key_ring import KeyRing
from moebius_gateway.auth.keys import KeysError, hashed
from tests.waiting import until


@asynccontextmanager
async def ring(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[KeyRing, CollectorRegistry]]:
    monkeypatch.setattr(key_ring, "LOOK_SECONDS", 0.01)
    registry = CollectorRegistry()
    made = KeyRing(file, registry)
    task = asyncio.create_task(made.keep_current())
    try:
        yield made, registry
        assert not task.done()
    finally:
        task.cancel()


def test_without_a_file_everybody_is_let_in() -> None:
    assert KeyRing(None, CollectorRegistry()).client(None) == Client()


async def test_changes_are_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"a {hashed('one')}\n")
    async with ring(file, monkeypatch) as (keys, registry):
        assert keys.client("one") == Client("a")
        assert keys.client("two") is None
        assert keys.client(None) is None
        assert keys.client(hashed("one")) is None, "the hash is no key"
        file.write_text(f'[[keys]]\nname = "b"\nhash = "{hashed("two")}"\npriority = "low"\n')
        await until(lambda: keys.client("two"))
        assert keys.client("one") is None
        assert keys.clients[0].limits.priority is Priority.LOW
        assert registry.get_sample_value("moebius_gateway_api_keys") == 1


async def test_what_is_wrong_or_gone_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"a {hashed('one')}\n")

    def faults(registry: CollectorRegistry) -> float:
        return registry.get_sample_value("moebius_gateway_api_key_reloads_total", {"result": "faulty"}) or 0

    async with ring(file, monkeypatch) as (keys, registry):
        file.write_text("nonsense\n")
        await until(lambda: faults(registry) == 1)
        assert keys.client("one") is not None
        file.unlink()
        await until(lambda: faults(registry) == 2)
        assert keys.client("one") is not None
        file.write_text(f"b {hashed('two')}\n")
        await until(lambda: keys.client("two"))


async def test_a_mounted_secret_whose_links_are_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, key in (("v1", "one"), ("v2", "two")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "keys").write_text(f"a {hashed(key)}\n")
        os.utime(tmp_path / version / "keys", (1, 1))
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "keys").symlink_to("data/keys")
    async with ring(tmp_path / "keys", monkeypatch) as (keys, _):
        (tmp_path / "next").symlink_to("v2")
        (tmp_path / "next").replace(tmp_path / "data")
        await until(lambda: keys.client("two"))
        assert keys.client("one") is None


@pytest.mark.parametrize("content", [None, b"nonsense", b"\xff\xfe"])
def test_at_the_start_a_file_that_cannot_be_used_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(KeysError, match="keys"):
        KeyRing(tmp_path / "keys", CollectorRegistry())
