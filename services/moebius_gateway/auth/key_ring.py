"""The keys that are valid now, read again whenever their file changes."""

import asyncio
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from moebius_gateway.admission.limits import Client
from moebius_gateway.auth.keys import ApiKey, KeysError, hashed, parse_keys

# Seconds between looks at the file. Its content is compared, not its time: the files of a mounted
# Kubernetes Secret are links whose targets are exchanged.
LOOK_SECONDS = 1.0

logger = structlog.get_logger(__name__)


class KeyRing:
    """Without a file everybody is let in, as the same client."""

    def __init__(self, file: Path | None, registry: CollectorRegistry) -> None:
        """Raises `KeysError` if there is a file that cannot be used."""
        self._file = file
        self._content: bytes | None = None
        self._keys: dict[str, ApiKey] = {}
        self._fault = ""
        self._count = Gauge("moebius_gateway_api_keys", "API keys that are valid", registry=registry)
        self._reloads = Counter(
            "moebius_gateway_api_key_reloads",
            "Changes of the file with API keys: ok, or faulty, which leaves the keys as they are",
            ["result"],
            registry=registry,
        )
        for result in ("ok", "faulty"):
            self._reloads.labels(result)
        if file is None:
            logger.info("no API keys are set: whoever reaches the address is served", flag="--api-keys")
        else:
            self._load(_read(file))

    def client(self, key: str | None) -> Client | None:
        """Whose key it is; None if it is nobody's."""
        if self._file is None:
            return Client()
        found = self._keys.get(hashed(key)) if key is not None else None
        return found.client if found is not None else None

    @property
    def clients(self) -> list[Client]:
        return [key.client for key in self._keys.values()]

    async def keep_current(self) -> None:
        """For ever: takes in changes of the file. One that is faulty, or gone, changes nothing."""
        while self._file is not None:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                content = await asyncio.to_thread(_read, self._file)
                if content == self._content:
                    continue
                self._load(content)
            except KeysError as error:
                if self._fault != str(error):  # once for each fault, not once for each look
                    self._fault = str(error)
                    self._reloads.labels("faulty").inc()
                    logger.error("API keys not reloaded", file=str(self._file), error=str(error))
            else:
                self._reloads.labels("ok").inc()

    def _load(self, content: bytes) -> None:
        try:
            keys = parse_keys(content.decode())
        except UnicodeDecodeError:
            raise KeysError(f"{self._file} is not text") from None
        except KeysError as error:
            raise KeysError(f"{self._file}: {error}") from None
        self._keys = {key.hash: key for key in keys}
        self._content, self._fault = content, ""
        self._count.set(len(keys))
        logger.info("API keys loaded", file=str(self._file), keys=len(keys))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise KeysError(f"{file} cannot be read: {error.strerror}") from None
