"""What the HTTP side needs of whoever generates tokens; `workers.dispatcher.Dispatcher` is it."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from moebius_gateway.types import Generation, ModelInfo, Tokens
from moebius_gateway.workers.view import WorkerView


class Backend(Protocol):
    """All calls but `start`, `stop` and `stream` answer from memory."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def models(self) -> Sequence[ModelInfo]: ...

    def model(self, model_id: str) -> ModelInfo | None: ...

    def ready(self, model_id: str | None = None) -> bool:
        """Whether a worker can serve the model (any model) now."""
        ...

    def ready_workers(self, model_id: str) -> Sequence[WorkerView]:
        """Those that can serve the model now."""
        ...

    def workers(self) -> Sequence[WorkerView]: ...

    def tokenizer_files(self, info: ModelInfo) -> dict[str, bytes]:
        """Name to content; raises `GenerationError` if they were forgotten."""
        ...

    def stream(self, generation: Generation) -> AsyncGenerator[Tokens, None]:
        """Yields until a finish reason; raises `GenerationError`. Closing it cancels the generation."""
        ...
