"""The workers behind the gate: the HTTP side asks it as it would ask the dispatcher itself."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from moebius_gateway.admission.gate import Gate
from moebius_gateway.api.backend import Backend
from moebius_gateway.types import Generation, ModelInfo, Tokens
from moebius_gateway.workers.view import WorkerView


class GatedBackend:
    """Implements `Backend`: streams begin when it is their turn; all else is answered by the one behind."""

    def __init__(self, backend: Backend, gate: Gate) -> None:
        self._backend = backend
        self._gate = gate

    async def start(self) -> None:
        await self._backend.start()

    async def stop(self) -> None:
        await self._backend.stop()

    def models(self) -> Sequence[ModelInfo]:
        return self._backend.models()

    def model(self, model_id: str) -> ModelInfo | None:
        return self._backend.model(model_id)

    def ready(self, model_id: str | None = None) -> bool:
        return self._backend.ready(model_id)

    def ready_workers(self, model_id: str) -> Sequence[WorkerView]:
        return self._backend.ready_workers(model_id)

    def workers(self) -> Sequence[WorkerView]:
        return self._backend.workers()

    def tokenizer_files(self, info: ModelInfo) -> dict[str, bytes]:
        return self._backend.tokenizer_files(info)

    async def stream(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        generated = 0
        async with self._gate.place(generation) as place:
            try:
                async with aclosing(self._backend.stream(generation)) as stream:
                    async for tokens in stream:
                        if tokens.cached_tokens:
                            self._gate.shared(generation, place, tokens.cached_tokens)
                        generated += len(tokens.token_ids)
                        if tokens.finish_reason is not None:
                            self._gate.ended(generation, place, generated)
                        yield tokens
            finally:
                self._gate.charge_output(generation, generated)
