from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from hypothesis import settings

from tests.gateway.http_server import Gateway, ScriptedBackend, running_gateway, until_ready

# How long an example takes depends on what else runs on the machine.
settings.register_profile("gateway", deadline=None)
settings.load_profile("gateway")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_gateway() -> AsyncIterator[Gateway]:
    async with running_gateway(ScriptedBackend(), keep_alive_interval=0.2) as gateway:
        await until_ready(gateway)
        yield gateway


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    """One server for all tests of a session loop; each finds a fresh script."""
    shared_gateway.backend.reset()
    return shared_gateway
