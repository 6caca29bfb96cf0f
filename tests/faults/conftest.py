import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.load import KILLING_TOKEN_ID, RAISING_TOKEN_ID, Prompt, Seen, sure_prompts
from tests.stack import Stack, stack
from tests.tiny import write_checkpoint

STREAMS = 16
# Seconds without a step after which the front calls its engine stalled.
STALL_TIMEOUT = 3.0


@dataclass(frozen=True)
class Scene:
    """A running stack, and what its clients see when nothing goes wrong."""

    running: Stack
    model: str
    undisturbed: list[tuple[Prompt, Seen]]


class Scenes:
    """Stacks by number of workers: every scenario leaves its stack well, so that the next can use it."""

    def __init__(self, folder: Path, exits: AsyncExitStack) -> None:
        self._folder = folder
        self._exits = exits
        # So many layers: a step takes long enough for a fault to come between two of them, and longer than a
        # client takes to read what 16 streams got by it.
        self._checkpoint = write_checkpoint(folder / "tiny-mixtral", "mixtral", num_hidden_layers=24)
        self._scenes: dict[int, Scene] = {}
        # What the first scene was asked, and what it said: another says the same.
        self._undisturbed: list[tuple[Prompt, Seen]] = []

    async def with_workers(self, workers: int) -> Scene:
        if workers not in self._scenes:
            self._scenes[workers] = await self._set(workers)
        return self._scenes[workers]

    async def _set(self, workers: int) -> Scene:
        faults = [
            {"token_id": KILLING_TOKEN_ID, "action": "kill"},
            {"token_id": RAISING_TOKEN_ID, "action": "raise"},
        ]
        env = {
            "MOEBIUS_WORKER_STALL_TIMEOUT": str(STALL_TIMEOUT),
            "MOEBIUS_WORKER_INJECT_FAULTS": json.dumps(faults),
        }
        state = self._folder / f"state-{workers}"
        running = await self._exits.enter_async_context(
            stack(self._checkpoint, state, workers=workers, env=env)
        )
        model = await running.model()
        if not self._undisturbed:
            async with running.client() as client:
                self._undisturbed = await sure_prompts(client, model, STREAMS)
        return Scene(running, model, self._undisturbed)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def scenes(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scenes]:
    async with AsyncExitStack() as exits:
        yield Scenes(tmp_path_factory.mktemp("faults"), exits)
