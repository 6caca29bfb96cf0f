from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.stack import Stack, stack
from tests.tiny import write_checkpoint


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two workers with a tiny Mixtral behind one gateway, for all tests here that break nothing."""
    folder: Path = tmp_path_factory.mktemp("tiny-stack")
    async with stack(write_checkpoint(folder / "tiny-mixtral"), folder / "state") as running:
        yield running
