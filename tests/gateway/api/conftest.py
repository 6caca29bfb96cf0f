from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.api.chatty import MODEL, chatty_files
from tests.gateway.http_server import Gateway, ScriptedBackend, running_gateway, until_ready


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_chatty() -> AsyncIterator[Gateway]:
    backend = ScriptedBackend(files=chatty_files(), known=[MODEL])
    async with running_gateway(backend) as gateway:
        await until_ready(gateway)
        yield gateway


@pytest.fixture
def chatty(shared_chatty: Gateway) -> Gateway:
    """A gateway whose model reasons and calls tools, as Hermes and Qwen3 do."""
    shared_chatty.backend.reset()
    return shared_chatty
