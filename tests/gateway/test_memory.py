"""A gateway that runs for months: what is over leaves nothing behind."""

import asyncio
import ctypes
import gc

import psutil
import pytest

from tests.gateway.http_server import MODEL, ScriptedBackend, running_gateway

MIB = 2**20


def kept() -> int:
    """Bytes of memory that are in use; what the C library keeps for later is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"model": MODEL.id, "prompt": "x" * 20_000}, {"Timeout": "-1"}, 400),
        ({"model": MODEL.id, "prompt": "x" * 200_000}, {}, 400),
        ({"model": "unknown", "prompt": "x" * 20_000}, {}, 404),
    ],
)
async def test_failing_requests_leave_nothing(
    body: dict[str, str], headers: dict[str, str], status: int
) -> None:
    async with running_gateway(ScriptedBackend()) as gateway, gateway.client() as client:

        async def fail(count: int) -> None:
            answers = [await client.post("/v1/completions", json=body, headers=headers) for _ in range(count)]
            assert {answer.status_code for answer in answers} == {status}

        # By then allocators have what they keep for the next time.
        await fail(300)
        before = kept()
        await fail(300)
        assert kept() - before < 10 * MIB
        assert len(asyncio.all_tasks()) < 20
