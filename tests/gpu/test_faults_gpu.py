"""Eight streams of an NVFP4 model whose engine is killed: on a GPU, with kernels and graphs, they say what
they say undisturbed.

A batch of another size adds up in another order, and bf16 shows that: where the best tokens are nearly equal,
either will do. Whether they were is asked for each token that a stream said, by a request of one token. Also
without a GPU, where all is equal.
"""

import asyncio
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import httpx
import pytest
import torch

from moebius_cli.view import WorkerView
from moebius_worker.sim.vocabulary import vocabulary
from tests.faults.checks import all_ready
from tests.stack import Stack, stack
from tests.waiting import until

CHECKPOINT = Path(__file__).parents[1] / "data" / "checkpoints" / "qwen3_moe-nvfp4-modelopt"
GPU = torch.cuda.is_available()
# A GPU would be done with fewer before anybody strikes.
STREAMS, PROMPT, OUTPUT = 8, 24, 384
# How much less likely than the best a token may be, in nats.
NEAR = 0.2 if GPU else 1e-3
SETTINGS = {
    "MOEBIUS_WORKER_KV_CACHE_MEMORY": "64MiB",
    "MOEBIUS_WORKER_MAX_RUNNING": str(STREAMS),
    "MOEBIUS_WORKER_MAX_STEP_TOKENS": "64",
    "MOEBIUS_WORKER_MAX_MODEL_LEN": "512",
    "MOEBIUS_WORKER_THREADS": "1",
}


def write_model(path: Path) -> Path:
    """The checkpoint with a tokenizer all of whose tokens are words: a text has its ids."""
    shutil.copytree(CHECKPOINT, path)
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    tokenizer = json.loads(vocabulary("").files["tokenizer.json"])
    tokenizer["model"] |= {"vocab": {f"Ġw{token_id}": token_id for token_id in range(size)}, "merges": []}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": []}))
    (path / "tokenizer_config.json").write_text("{}")
    return path


def ids_of(text: str) -> list[int]:
    return [int(word.removeprefix("w")) for word in text.split()]


class Client:
    def __init__(self, running: Stack, model: str) -> None:
        self.running, self.model = running, model
        source = random.Random(5)
        self.prompts = [[source.randrange(512) for _ in range(PROMPT)] for _ in range(STREAMS)]

    async def texts(self, http: httpx.AsyncClient) -> list[list[int]]:
        """Of all streams at once."""

        async def one(prompt: list[int]) -> list[int]:
            body = {"model": self.model, "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0}
            body |= {"ignore_eos": True, "stream": True}
            text = ""
            async with http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    data = json.loads(line.removeprefix("data: "))
                    assert "error" not in data, data
                    text += data["choices"][0]["text"]
            return ids_of(text)

        said = await asyncio.gather(*map(one, self.prompts))
        assert all(len(ids) == OUTPUT for ids in said)
        return said

    async def check(self, http: httpx.AsyncClient, said: list[list[int]], other: list[list[int]]) -> None:
        """Each token is the best after those before it, and where `other` goes another way it may."""
        if said == other:
            print("all streams equal")
            return
        places = [(stream, place) for stream in range(STREAMS) for place in range(OUTPUT)]
        # A few at a time: the gateway turns away what would wait for long.
        some = asyncio.Semaphore(2 * STREAMS)

        async def tops_at(stream: int, place: int) -> dict[int, float]:
            async with some:
                return await self._tops(http, said, stream, place)

        found = await asyncio.gather(*(tops_at(*at) for at in places))
        tops = dict(zip(places, found, strict=True))
        short = [max(tops[s, p].values()) - tops[s, p].get(said[s][p], float("-inf")) for s, p in places]
        assert max(short) < NEAR, f"stream and token {places[short.index(max(short))]}: {max(short)} nats"
        firsts = []
        for stream, (one, two) in enumerate(zip(said, other, strict=True)):
            first = next((place for place in range(OUTPUT) if one[place] != two[place]), None)
            if first is not None:
                top = tops[stream, first]
                firsts.append(max(top.values()) - top.get(two[first], float("-inf")))
        assert max(firsts, default=0) < NEAR, f"{max(firsts)} nats below the best, undisturbed"
        ties = sum(one > 0 for one in short)
        print(
            f"{STREAMS - len(firsts)} of {STREAMS} streams equal; {ties} of {len(short)} tokens were not the"
        )
        print(f"best, at most {max(short + firsts):.3f} nats below")

    async def _tops(self, http, said: list[list[int]], stream: int, place: int) -> dict[int, float]:
        """The most likely tokens after the first `place` that a stream said."""
        prompt = self.prompts[stream] + said[stream][:place]
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5}
        response = await http.post("/v1/completions", json=body | {"ignore_eos": True})
        response.raise_for_status()
        [top] = response.json()["choices"][0]["logprobs"]["top_logprobs"]
        return {ids_of(token)[0]: value for token, value in top.items()}


async def kill_and_compare(folder: Path, workers: int) -> None:
    model, state = write_model(folder / "model"), folder / "state"
    async with stack(model, state, workers=workers, env=SETTINGS, start_timeout=300) as running:
        before = await all_ready(running)
        if GPU:
            logs = [Path(worker.log).read_text() for worker in before.workers]
            assert all(re.search(r"CUDA graphs captured.*sizes=\[1", log) for log in logs)

        async with running.client() as http:
            client = Client(running, await running.model())
            undisturbed = await client.texts(http)
            kill = asyncio.create_task(kill_the_busiest(running))
            rounds = [await client.texts(http)]
            # To find out whom to kill may take longer than all streams.
            while not kill.done():
                rounds.append(await client.texts(http))
            killed = await kill
            assert await running.metric("moebius_gateway_migrations_total", 'outcome="resumed"') > 0
            after = await all_ready(running)
            assert killed in {one.engine_pid for one in before.workers}
            assert killed not in {one.engine_pid for one in after.workers}
            for said in rounds:
                await client.check(http, said, undisturbed)


async def kill_the_busiest(running: Stack) -> int:
    async def busiest() -> WorkerView | None:
        busy = [one for one in (await running.view()).workers if one.engine_pid and one.running]
        return max(busy, key=lambda one: one.running, default=None)

    worker = await until(busiest, "a busy worker")
    os.kill(worker.engine_pid, signal.SIGKILL)
    return int(worker.engine_pid)


@pytest.mark.timeout(500)
@pytest.mark.skipif(not GPU, reason="there is no NVIDIA GPU")
@pytest.mark.parametrize("workers", [1, 2])
def test_streams_outlive_their_engine(tmp_path: Path, workers: int) -> None:
    asyncio.run(kill_and_compare(tmp_path, workers))
