"""Streams outlive engines whose successors stood by, and nobody stands by for a worker that is gone."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from moebius_cli.view import WorkerView
from tests.faults.checks import all_ready
from tests.faults.load import stream, sure_prompts
from tests.stack import Stack, stack
from tests.timed import same
from tests.tiny import write_checkpoint
from tests.waiting import until
from tests.worker.front.worker_process import gone, standing_by

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300), pytest.mark.timed]
STREAMS, AT_CHUNK = 3, 40


async def ready(running: Stack, engines: int) -> tuple[WorkerView, int]:
    """The worker, and who stands by, once so many processes have done so."""

    async def both() -> tuple[WorkerView, int] | None:
        [worker] = (await all_ready(running)).workers
        pid = standing_by(worker.pid, worker.engine_pid)
        return (worker, pid) if Path(worker.log).read_text().count("standing by") == engines and pid else None

    worker, pid = await until(both, "one stands by")
    return worker, pid


async def test_streams_outlive_engines_and_who_stands_by_for_them(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny-mixtral", "mixtral", num_hidden_layers=8)
    env = {"MOEBIUS_WORKER_STANDBY": "yes", "MOEBIUS_WORKER_THREADS": "1"}
    async with stack(checkpoint, tmp_path / "state", workers=1, env=env) as running:
        model = await running.model()
        async with running.client() as client:
            undisturbed = await sure_prompts(client, model, STREAMS)

            async def killing(pid: int) -> None:
                """While streams run."""
                chunks = 0

                def on_chunk() -> None:
                    nonlocal chunks
                    chunks += 1
                    if chunks == AT_CHUNK:
                        os.kill(pid, signal.SIGKILL)

                seen = await asyncio.gather(
                    *(stream(client, prompt.body(model), on_chunk) for prompt, _ in undisturbed)
                )
                assert gone(pid)
                same([one.answer() for one in seen], [one.answer() for _, one in undisturbed])

            first, heir = await ready(running, 1)
            await killing(first.engine_pid)
            second, disowned = await ready(running, 2)
            assert second.engine_pid == heir

            os.kill(disowned, signal.SIGKILL)
            await killing(second.engine_pid)
            third, orphan = await ready(running, 3)
            assert third.engine_pid not in (heir, disowned)
            assert third.pid == first.pid

            await killing(third.pid)
            await until(lambda: gone(third.engine_pid) and gone(orphan), "who was left is gone")
