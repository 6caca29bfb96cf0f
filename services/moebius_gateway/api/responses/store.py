"""Responses that clients may come back to: a bounded number, in memory, of this gateway alone."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import orjson

from moebius_gateway.api.errors import ApiError

MAX_RESPONSES = 4096
MAX_BYTES = 256 << 20


@dataclass(slots=True)
class Stored:
    """`items`: all of the conversation before the response, its own request's last.

    `owner` names the client whose it is; to others it is not there.
    """

    owner: str
    response: dict[str, Any]
    # Those of the request itself, with ids, as JSON.
    input_items: list[dict[str, Any]]
    items: list[Any]
    size: int = field(init=False)
    # Set while it is generated in the background.
    task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.measure()

    def measure(self) -> None:
        self.size = len(orjson.dumps(self.response)) + len(orjson.dumps(self.input_items))


class ResponseStore:
    """The least recently used go first; what is generated in the background stays until it is done."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, stored: Stored) -> None:
        self._kept[stored.response["id"]] = stored
        self._bytes += stored.size
        self._evict()

    def replace(self, stored: Stored, response: dict[str, Any]) -> None:
        """`response` is what has become of it. One that was deleted meanwhile stays deleted."""
        kept = stored.response["id"] in self._kept
        before = stored.size
        stored.response = response
        stored.measure()
        if kept:
            self._bytes += stored.size - before
            self._evict()

    def get(self, id_: str, owner: str, param: str | None = None) -> Stored:
        """Raises `ApiError` (404)."""
        stored = self._kept.get(id_)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"response '{id_}' is not here: it was never stored, is too old, or is another gateway's",
                param=param,
                code="response_not_found",
            )
        self._kept.move_to_end(id_)
        return stored

    def delete(self, id_: str, owner: str) -> None:
        """Raises `ApiError` (404)."""
        stored = self.get(id_, owner)
        if stored.task is not None:
            stored.task.cancel()
        self._drop(id_)

    def _drop(self, id_: str) -> None:
        self._bytes -= self._kept.pop(id_).size

    def _evict(self) -> None:
        excess = [id_ for id_, stored in self._kept.items() if stored.task is None]
        while excess and (len(self._kept) > self._max_responses or self._bytes > self._max_bytes):
            self._drop(excess.pop(0))
