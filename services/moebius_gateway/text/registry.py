"""The text sides of all models that are known: made once for each content hash, of the catalog's files."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import structlog

from moebius_gateway.text.errors import TextError
from moebius_gateway.text.model import TextModel
from moebius_gateway.types import GenerationError, ModelInfo

# A tokenizer's content hash, and the family of answers' format if that is set.
Key = tuple[str, str | None]

logger = structlog.get_logger(__name__)


class TextModels:
    """Loads text models on demand and keeps them; requests that need the same one share its loading."""

    def __init__(
        self,
        files: Callable[[ModelInfo], Mapping[str, bytes]],
        families: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`files` gives a model's tokenizer files, name to content, or raises `GenerationError`.

        `families`: by model, the family of its answers' format; others are told by their files.
        """
        self._files = files
        self._families = families
        self._loading: dict[Key, asyncio.Task[TextModel]] = {}
        # Why the last attempt failed.
        self._failures: dict[Key, str] = {}

    async def get(self, info: ModelInfo) -> TextModel:
        """Raises `TextError` when the files are unusable, `GenerationError` when they are gone."""
        key = self._key(info)
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load(info))
        # Shielded, since other requests may be waiting for the same load.
        return await asyncio.shield(task)

    def loaded(self, info: ModelInfo) -> bool:
        """Whether a request need not wait for the model's text side."""
        task = self._loading.get(self._key(info))
        # A load that failed is not kept.
        return task is not None and task.done()

    def failure(self, info: ModelInfo) -> str | None:
        """Why the model's text side could not be loaded when that was last tried; None if it could."""
        return self._failures.get(self._key(info))

    async def keep_loaded(self, models: Callable[[], Iterable[ModelInfo]], interval: float) -> None:
        """For ever: loads what is new and retries what failed, so that requests and readiness need not.

        What no model needs any more is forgotten.
        """
        while True:
            known = list(models())
            self._forget_all_but({self._key(info) for info in known})
            for info in known:
                with contextlib.suppress(TextError, GenerationError):  # recorded and logged where it loads
                    await self.get(info)
            await asyncio.sleep(interval)

    async def _load(self, info: ModelInfo) -> TextModel:
        try:
            model = await asyncio.to_thread(_text_model, self._files(info), self._families.get(info.id))
        except BaseException as error:
            if self._failures.get(self._key(info)) != str(error):
                logger.error("text model cannot be loaded", model=info.id, error=str(error))
            self._failures[self._key(info)] = str(error)
            del self._loading[self._key(info)]
            raise
        self._failures.pop(self._key(info), None)
        logger.info("text model loaded", model=info.id, tokenizer_hash=info.tokenizer_hash)
        return model

    def _key(self, info: ModelInfo) -> Key:
        return info.tokenizer_hash, self._families.get(info.id)

    def _forget_all_but(self, keys: set[Key]) -> None:
        for gone in [key for key, task in self._loading.items() if key not in keys and task.done()]:
            del self._loading[gone]
        for gone in self._failures.keys() - keys:
            del self._failures[gone]


def _text_model(files: Mapping[str, bytes], family: str | None) -> TextModel:
    """Raises `TextError` whatever is in the files: they come from outside, and must not end `keep_loaded`."""
    try:
        return TextModel(files, family)
    except TextError:
        raise
    except Exception as error:
        raise TextError(f"the tokenizer's files cannot be used: {error!r}") from error
