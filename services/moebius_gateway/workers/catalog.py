"""The models that workers serve or served, and their tokenizers, so that neither depends on who is alive."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from moebius_gateway.types import GenerationError, ModelInfo, Reason

Files = dict[str, bytes]

# Models that are remembered though no worker serves them; the oldest are forgotten first.
MAX_UNSERVED = 16


class Catalog:
    """Models by id, tokenizer files by content hash; bounded by what is served now and `MAX_UNSERVED`."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, ModelInfo] = OrderedDict()
        self._files: dict[str, Files] = {}
        self._fetching: dict[str, asyncio.Lock] = {}

    def models(self) -> list[ModelInfo]:
        return list(self._models.values())

    def model(self, model_id: str) -> ModelInfo | None:
        return self._models.get(model_id)

    def files(self, info: ModelInfo) -> Files:
        """The tokenizer's files, name to content. Raises GenerationError when they were forgotten."""
        files = self._files.get(info.tokenizer_hash)
        if files is None:
            message = f"The tokenizer of model {info.id!r} is not known: no worker has it any more"
            raise GenerationError(Reason.NOT_READY, message, retryable=True)
        return files

    async def fetch(self, tokenizer_hash: str, read: Callable[[], Awaitable[Files]]) -> None:
        """Makes sure of a tokenizer's files; of several workers that have them one is asked at a time."""
        async with self._fetching.setdefault(tokenizer_hash, asyncio.Lock()):
            if tokenizer_hash not in self._files:
                self._files[tokenizer_hash] = await read()

    def update(self, served: Iterable[ModelInfo]) -> None:
        """Takes in what connected workers serve now.

        When workers disagree about a name (a rollout), the model that was known first stays until nobody
        serves it. Its `max_model_len` is the least of those that serve it, so that any of them will do.
        """
        # Workers are many, what they serve is little.
        alike: dict[tuple[str, str], ModelInfo] = {}
        for info in served:
            first = alike.setdefault((info.id, info.tokenizer_hash), info)
            if info.max_model_len < first.max_model_len:
                alike[info.id, info.tokenizer_hash] = replace(first, max_model_len=info.max_model_len)
        for info in alike.values():
            known = self._models.get(info.id)
            same = alike.get((known.id, known.tokenizer_hash)) if known is not None else None
            if known is None or same is None:
                known = same = info
            self._models[info.id] = replace(known, max_model_len=same.max_model_len)
            self._models.move_to_end(info.id)
        self._forget({name for name, _ in alike}, {tokenizer for _, tokenizer in alike})

    def _forget(self, served: set[str], hashes: set[str]) -> None:
        unserved = [name for name in self._models if name not in served]
        for name in unserved[: max(len(unserved) - MAX_UNSERVED, 0)]:
            del self._models[name]
        hashes = hashes | {info.tokenizer_hash for info in self._models.values()}
        for gone in [one for one in self._files if one not in hashes]:
            del self._files[gone]
            self._fetching.pop(gone, None)
