"""The gateway's HTTP side on a real port of this machine, over a backend that says what a test scripts."""

import asyncio
import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client import CollectorRegistry

from moebius_gateway.api.lifecycle import Lifecycle
from moebius_gateway.api.services import Services
from moebius_gateway.app import build_app, build_services
from moebius_gateway.http_protocol import bounded
from moebius_gateway.server import Server, listen
from moebius_gateway.settings import GatewaySettings
from moebius_gateway.text.model import TextModel
from moebius_gateway.types import FinishReason, Generation, ModelInfo, TokenLogprobs, Tokens
from moebius_gateway.workers.view import WorkerState, WorkerView
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer
from tests.waiting import until

# A step of a script: tokens are yielded, an event is awaited, an error is raised.
Step = Tokens | asyncio.Event | Exception
Script = Callable[[Generation], Sequence[Step]]
MODEL = ModelInfo("org/tiny", "MixtralForCausalLM", "hash", 512, VOCAB_SIZE, (EOS_TOKEN_ID,), 1_700_000_000)


def tokenizer_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@dataclass
class ScriptedBackend:
    """Implements `Backend`; keeps what it was asked for."""

    files: dict[str, bytes] = field(default_factory=tokenizer_files)
    known: list[ModelInfo] = field(default_factory=lambda: [MODEL])
    is_ready: bool = True
    max_running: int = 1000
    script: Script | None = None
    generations: list[Generation] = field(default_factory=list)
    running: int = 0

    def __post_init__(self) -> None:
        self.text = TextModel(self.files)

    def reset(self) -> None:
        self.script, self.is_ready = None, True
        self.generations.clear()

    def say(self, text: str, *, piece: int = 1, finish: FinishReason = FinishReason.STOP) -> list[Step]:
        """`text` as tokens, a byte each so that characters are cut, `piece` at a time; then the end."""
        spelling = self.text.token_bytes.spelling
        by_byte = {spelling(i): i for i in reversed(range(VOCAB_SIZE))}
        ids = [by_byte[bytes([byte])] for byte in text.encode()]
        if finish is FinishReason.STOP:
            ids.append(EOS_TOKEN_ID)
        pieces = [tuple(ids[i : i + piece]) for i in range(0, len(ids), piece)]
        return [Tokens(p, (), finish if i == len(pieces) - 1 else None) for i, p in enumerate(pieces)]

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def models(self) -> list[ModelInfo]:
        return self.known

    def model(self, model_id: str) -> ModelInfo | None:
        return next((model for model in self.known if model.id == model_id), None)

    def ready(self, model_id: str | None = None) -> bool:
        return self.is_ready and bool(self.known)

    def ready_workers(self, model_id: str) -> list[WorkerView]:
        return self.workers() if self.is_ready else []

    def workers(self) -> list[WorkerView]:
        state = WorkerState.READY if self.is_ready else WorkerState.LOADING
        return [WorkerView("127.0.0.1:1", state, "half way", max_running=self.max_running)]

    def tokenizer_files(self, info: ModelInfo) -> dict[str, bytes]:
        return self.files

    async def stream(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        self.generations.append(generation)
        steps = self.script(generation) if self.script else self.say("Hello 🙂!")
        self.running += 1
        try:
            for step in steps:
                await asyncio.sleep(0)
                match step:
                    case Tokens():
                        yield self._with_logprobs(step, generation)
                    case asyncio.Event():
                        await step.wait()
                    case _:
                        raise step
        finally:
            self.running -= 1

    def _with_logprobs(self, tokens: Tokens, generation: Generation) -> Tokens:
        count = generation.sampling.logprobs
        if count is None:
            return tokens
        entries = [
            TokenLogprobs(-0.5, tuple((other, -0.5 - i) for i, other in enumerate(range(50, 50 + count))))
            for _ in tokens.token_ids
        ]
        return Tokens(tokens.token_ids, tuple(entries), tokens.finish_reason, tokens.cached_tokens)


@dataclass
class Gateway:
    url: str
    backend: ScriptedBackend
    lifecycle: Lifecycle
    registry: CollectorRegistry
    services: Services

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=20)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        settings = {
            "base_url": f"{self.url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "timeout": 20,
        } | options
        return openai.AsyncOpenAI(**settings)

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port is not None
        return url.host, url.port

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of that name whose labels include `labels`; an unknown name is an error."""
        totals: Counter[str] = Counter()
        for family in self.registry.collect():
            totals[family.name] += 0  # it may have no series yet
            for sample in family.samples:
                totals[sample.name] += sample.value if labels.items() <= sample.labels.items() else 0
        return totals[name] if name in totals else _unknown(name)


def _unknown(name: str) -> float:
    raise AssertionError(f"no metric {name}")


@contextlib.asynccontextmanager
async def running_gateway(backend: ScriptedBackend, **settings: Any) -> AsyncIterator[Gateway]:
    lifecycle, registry = Lifecycle(), CollectorRegistry()
    configured = GatewaySettings(**settings)
    services = build_services(configured, backend, lifecycle, registry)
    protocol = bounded(configured.max_header_bytes, configured.max_headers)
    server = Server(build_app(services), protocol, lifespan=True)
    with listen("127.0.0.1", 0) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        try:
            await until(lambda: server.started or serving.done())
            assert server.started, "the server could not start"
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield Gateway(url, backend, lifecycle, registry, services)
        finally:
            server.should_exit = True
            await serving


async def until_ready(gateway: Gateway) -> None:
    """Its model's tokenizer is loaded, in the background, soon after the start."""
    async with gateway.client() as client:

        async def ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await until(ready, "the gateway is ready", 10)


def events(body: str) -> list[str]:
    """The data of the events of a stream."""
    return [part.removeprefix("data: ") for part in body.split("\n\n") if part.startswith("data: ")]
