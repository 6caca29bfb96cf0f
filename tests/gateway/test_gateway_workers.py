"""The gateway's process over workers that fail: what HTTP clients see, and what is left behind."""

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from moebius_common.child import dies_with_us
from moebius_gateway.text.model import TextModel
from moebius_proto.worker.v1 import worker_pb2 as pb
from tests.gateway.dispatching import ROOT
from tests.gateway.http_server import events
from tests.gateway.worker_standin import Plan, StandIn, serving, undisturbed
from tests.ports import free_port
from tests.tiny import write_tokenizer
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timed]
PROMPT = (5, 6, 7)
KILLER = 300
MAX_TOKENS = 40


@dataclass
class Scene:
    """A gateway in a process of its own, and its two workers in this one."""

    http: httpx.AsyncClient
    admin: str
    process: asyncio.subprocess.Process
    workers: list[StandIn]
    text: TextModel
    log: IO[bytes]

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read().decode()

    def said(self, seed: int, max_tokens: int = MAX_TOKENS) -> str:
        """The text of an undisturbed generation."""
        tokens = undisturbed(PROMPT, seed, max_tokens)
        return b"".join(map(self.text.token_bytes.spelling, tokens)).decode(errors="replace")

    def running(self) -> int:
        return sum(len(worker.running) for worker in self.workers)

    def busy(self) -> StandIn:
        return max(self.workers, key=lambda worker: len(worker.running))

    async def metrics(self, name: str) -> dict[str, float]:
        """Of a series with at most one label: by the label's value."""
        families = text_string_to_metric_families((await self.http.get(f"{self.admin}/metrics")).text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        assert samples, f"{name} is not exported"
        return {"".join(sample.labels.values()): sample.value for sample in samples}

    async def ready(self) -> bool:
        """Both workers are known, so that either may be relied on."""
        return sum((await self.metrics("moebius_gateway_worker_up")).values()) == len(self.workers)

    async def idle(self) -> bool:
        """No gauge of requests is left above zero."""
        names = ("worker_streams", "generations_in_flight", "streams_waiting")
        return not any([sum((await self.metrics(f"moebius_gateway_{name}")).values()) for name in names])


@asynccontextmanager
async def gateway(files: Path, workers: Sequence[StandIn], *arguments: str) -> AsyncIterator[Scene]:
    with tempfile.TemporaryFile() as log:
        async with AsyncExitStack() as stack:
            ports = [await stack.enter_async_context(serving(worker)) for worker in workers]
            listen, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
            addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
            process = await asyncio.create_subprocess_exec(
                *dies_with_us(
                    *(sys.executable, "-m", "moebius_gateway", "--listen", listen, "--workers", addresses),
                    *("--admin-listen", admin),
                    *("--keep-alive-interval", "0.2", "--log-level", "warning", *arguments),
                ),
                cwd=ROOT,
                stderr=log,
            )
            limits = httpx.Limits(max_connections=64)
            http = await stack.enter_async_context(
                httpx.AsyncClient(base_url=f"http://{listen}", timeout=20, limits=limits)
            )
            text = TextModel({file.name: file.read_bytes() for file in files.iterdir()})

            async def answers() -> bool:
                try:
                    return (await http.get("/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            try:
                await until(answers, "the gateway is ready")
                yield Scene(http, f"http://{admin}", process, list(workers), text, log)
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Scene]:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        files = tuple((file.name, file.read_bytes()) for file in Path(folder).iterdir())
        plan = Plan(rate=60, killers=frozenset({KILLER}), tokenizer=files)
        async with gateway(Path(folder), [StandIn(plan, name=f"w{i}") for i in range(2)]) as scene:
            yield scene


@pytest_asyncio.fixture(loop_scope="module")
async def scene(shared: Scene) -> AsyncIterator[Scene]:
    """Both workers ready before; after, nothing is left of a test, and the gateway is the same process."""
    for worker in shared.workers:
        worker.refusal, worker.paused = None, False
        if worker.state != pb.STATE_READY:
            worker.become(pb.STATE_READY)
    await until(shared.ready, "both workers are ready")
    yield shared
    await until(shared.idle, "all gauges are back at zero")
    await until(lambda: not shared.running())
    assert shared.process.returncode is None
    assert not shared.logged()


@dataclass
class Seen:
    status: int = 0
    body: str = ""
    text: str = ""
    finish_reason: str | None = None
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, int] | None = None


def request(seed: int, **more: object) -> dict[str, object]:
    body = {"model": "standin", "prompt": list(PROMPT), "seed": seed, "max_tokens": MAX_TOKENS}
    return body | {"temperature": 0} | more


async def stream(scene: Scene, seen: Seen, body: dict[str, object]) -> Seen:
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with scene.http.stream("POST", "/v1/completions", json=streamed) as response:
        seen.status = response.status_code
        async for line in response.aiter_lines():
            seen.body += f"{line}\n"
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                seen.usage = chunk["usage"] or seen.usage
                for choice in chunk["choices"]:
                    assert seen.finish_reason is None
                    seen.text += choice["text"]
                    seen.finish_reason = choice["finish_reason"]
                    seen.logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
    return seen


async def begin(scene: Scene, count: int, **more: object) -> list[tuple[Seen, asyncio.Task[Seen]]]:
    """`count` streams (seeds 0, 1, ...) that have all said something."""
    begun = []
    for seed in range(count):
        seen = Seen()
        begun.append((seen, asyncio.create_task(stream(scene, seen, request(seed, **more)))))
    await until(lambda: all(len(seen.text) > 5 for seen, _ in begun))
    return begun


async def finish(scene: Scene, begun: list[tuple[Seen, asyncio.Task[Seen]]]) -> None:
    """All end well, with the text and the counts of an undisturbed run."""
    await asyncio.gather(*(task for _, task in begun))
    for seed, (seen, _) in enumerate(begun):
        assert (seen.status, seen.finish_reason) == (200, "length")
        assert seen.text == scene.said(seed)
        assert seen.usage is not None
        counts = (seen.usage["prompt_tokens"], seen.usage["completion_tokens"])
        assert counts == (len(PROMPT), MAX_TOKENS)
        assert events(seen.body)[-1] == "[DONE]"


async def test_streams_go_on_when_an_engine_dies(scene: Scene) -> None:
    begun = await begin(scene, 8, logprobs=0)
    await scene.busy().die()
    await finish(scene, begun)
    for seed, (seen, _) in enumerate(begun):
        expected = [-token / 100 for token in undisturbed(PROMPT, seed, MAX_TOKENS)]
        assert seen.logprobs == pytest.approx(expected)


async def test_both_choices_of_a_request_go_on(scene: Scene) -> None:
    body = request(3, n=2)
    task = asyncio.create_task(scene.http.post("/v1/completions", json=body))
    await until(lambda: scene.running() == 2)
    await asyncio.gather(*(worker.die() for worker in scene.workers))
    answer = (await task).json()
    again = (await scene.http.post("/v1/completions", json=body)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [choice["text"] for choice in again["choices"]]
    assert texts[0] == scene.said(3)
    assert texts[1] != texts[0]
    assert answer["usage"]["completion_tokens"] == 2 * MAX_TOKENS


async def test_a_stop_string_is_found_across_a_death(scene: Scene) -> None:
    text = scene.said(0)
    stop = text[20:26]
    begun = await begin(scene, 1, stop=[stop])
    await scene.busy().die()
    (seen,) = await asyncio.gather(*(task for _, task in begun))
    assert seen.text == text[: text.index(stop)]
    assert seen.finish_reason == "stop"


async def test_with_the_only_worker_gone_streams_pause_audibly_and_go_on(scene: Scene) -> None:
    scene.workers[1].become(pb.STATE_LOADING)
    begun = await begin(scene, 4)
    worker = scene.workers[0]
    plan, worker.plan = worker.plan, replace(worker.plan, restart_seconds=2 * PATIENCE)
    before = [seen.body.count(": keep-alive") for seen, _ in begun]
    dying = asyncio.create_task(worker.die())
    try:
        await until(
            lambda: all(
                seen.body.count(": keep-alive") > n for (seen, _), n in zip(begun, before, strict=True)
            )
        )
    finally:
        dying.cancel()
        worker.plan = plan
    worker.restart()
    await finish(scene, begun)


async def test_poison_is_a_500_and_its_neighbours_finish(scene: Scene) -> None:
    poisoned = (await scene.metrics("moebius_gateway_poisoned_total"))[""]
    begun = await begin(scene, 8)
    answer = await scene.http.post("/v1/completions", json=request(0, prompt=[5, KILLER]))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "poisoned"
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    await finish(scene, begun)
    assert (await scene.metrics("moebius_gateway_poisoned_total"))[""] == poisoned + 1


async def test_full_workers_are_a_429_that_says_when_to_come_back(scene: Scene) -> None:
    # For longer than a request waits for its turn.
    error = pb.Error(reason=pb.REASON_OVERLOADED, message="full", retryable=True, retry_after_ms=70_000)
    for worker in scene.workers:
        worker.refusal = error
    for more in ({}, {"stream": True}):
        begun = time.monotonic()
        answer = await scene.http.post("/v1/completions", json=request(0, **more))
        assert time.monotonic() - begun < 15
        assert answer.status_code == 429
        # 69 where the second worker was asked more than a second after the first.
        assert 60 < int(answer.headers["retry-after"]) <= 70
        assert answer.json()["error"]["code"] == "overloaded"


async def test_with_no_worker_it_says_so_at_the_clients_deadline(scene: Scene) -> None:
    for worker in scene.workers:
        worker.become(pb.STATE_LOADING)
    await until(lambda: _is_ready(scene, False), "the gateway is not ready")
    begun = time.monotonic()
    headers = {"X-Request-Timeout": "0.5"}
    answer = await scene.http.post("/v1/completions", json=request(0), headers=headers)
    assert 0.4 < time.monotonic() - begun < 10
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    # What it serves is not forgotten meanwhile.
    models = (await scene.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["standin"]


async def _is_ready(scene: Scene, expected: bool) -> bool:
    return ((await scene.http.get("/readyz")).status_code == 200) is expected


async def _leave_stream(scene: Scene) -> None:
    body = request(0, stream=True, max_tokens=1000)
    async with scene.http.stream("POST", "/v1/completions", json=body) as response:
        await anext(response.aiter_lines())


async def _leave_answer(scene: Scene) -> None:
    task = asyncio.create_task(scene.http.post("/v1/completions", json=request(0, max_tokens=1000)))
    await until(lambda: scene.running() == 1)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("leave", [_leave_stream, _leave_answer])
@pytest.mark.parametrize("paused", [False, True], ids=["in mid-stream", "before the first token"])
async def test_a_client_that_leaves_frees_its_slot(
    scene: Scene, leave: Callable[[Scene], Awaitable[None]], paused: bool
) -> None:
    for worker in scene.workers:
        worker.paused = paused
    cancels = sum(len(worker.cancels) for worker in scene.workers)
    await leave(scene)
    await until(lambda: not scene.running())
    assert sum(len(worker.cancels) for worker in scene.workers) == cancels + 1


async def test_a_gateway_that_stops_cuts_its_streams_off_and_leaves_nothing_behind(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    files = tuple((file.name, file.read_bytes()) for file in tmp_path.iterdir())
    worker = StandIn(Plan(rate=60, tokenizer=files))
    async with gateway(tmp_path, [worker], "--drain-grace", "0") as scene:
        bodies = [request(seed, stream=True, max_tokens=1000) for seed in range(4)]
        streams = [asyncio.create_task(scene.http.post("/v1/completions", json=body)) for body in bodies]
        await until(lambda: len(worker.running) == 4)
        scene.process.terminate()
        assert await asyncio.wait_for(scene.process.wait(), PATIENCE) == 0
        for answer in await asyncio.gather(*streams):
            # As the status of a stream that had not begun, or as its last event.
            assert '"code":"draining"' in answer.text
        await until(lambda: not worker.gateways and not worker.running)
        # Python says on stderr what was left: tasks that were destroyed, errors that nobody saw.
        (line,) = scene.logged().splitlines()
        assert "requests were cut off" in line
