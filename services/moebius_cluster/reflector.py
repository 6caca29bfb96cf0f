"""A copy of some of the cluster's objects, kept current in memory: by list and watch, in a thread of its own.

Watches of the Kubernetes API are lost, fall silent or end with 410, and events are missed meanwhile. So a
watch is given up when it is silent for longer than its own end is away, everything but its regular end leads
to a new list, and a list is due from time to time anyway.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import structlog
import urllib3

from moebius_cluster.failures import reason_of
from moebius_common.backoff import backoff

T = TypeVar("T")

# Seconds before the next try after a failure; doubled with each failure in a row.
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
# Seconds that connecting, and each part of a list, may take.
CONNECT_TIMEOUT = 5.0
LIST_TIMEOUT = 30.0
# A watch that the server ends sooner, in seconds, did not end regularly.
SHORTEST_WATCH = 0.5
# Part of the period by which lists are spread, so that not all who watch list at once.
JITTER = 0.2

log = structlog.get_logger(__name__)


class Reflector(Generic[T]):
    """Objects by uid, as of the last word of the API server; while it is away, as they were then.

    `list_call`: a method of the `kubernetes` client that lists, with what it is to list:
    `partial(core.list_namespaced_pod, "default", label_selector="app=x")`.
    `parse`: from an object as JSON; one at which it raises is left out.
    `on_change`: called from the thread whenever `objects` or `synced` changed. It must not block.

    Times are in seconds. `relist_interval`: between lists, whatever the watch says. `watch_timeout`: after
    which the server ends a watch. `silence_timeout`: without a word after which a watch counts as lost; it
    is longer than `watch_timeout`, for a watch in which nothing happens is silent.
    """

    def __init__(
        self,
        list_call: Callable[..., Any],
        parse: Callable[[dict[str, Any]], T],
        *,
        on_change: Callable[[], None],
        relist_interval: float = 300.0,
        watch_timeout: float = 60.0,
        silence_timeout: float = 75.0,
    ) -> None:
        self._list_call = list_call
        self._parse = parse
        self._tell = on_change
        self._relist_interval = relist_interval
        self._watch_timeout = watch_timeout
        self._silence_timeout = silence_timeout
        self._objects: Mapping[str, T] = MappingProxyType({})
        self._synced = False
        self._heard = time.monotonic()
        self._relist_at = 0.0
        self._stopping = threading.Event()
        self._watching: urllib3.HTTPResponse | None = None

    def start(self) -> None:
        """Returns at once."""
        self._heard = time.monotonic()
        threading.Thread(target=self._run, name="reflector", daemon=True).start()

    def stop(self) -> None:
        """Returns at once; what is under way ends soon, and nobody is told of it."""
        self._stopping.set()
        if (response := self._watching) is not None:
            # Wakes the thread up; too late if the watch has just ended.
            with contextlib.suppress(ValueError, RuntimeError, OSError):
                response.shutdown()

    def objects(self) -> Mapping[str, T]:
        """Never changes; the next one is another."""
        return self._objects

    @property
    def synced(self) -> bool:
        """Whether a list succeeded; until then nothing is known."""
        return self._synced

    def age(self) -> float:
        """Seconds since the API server was heard last or, before the first time, since the start."""
        return time.monotonic() - self._heard

    # ---- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        failures, logged = 0, ""
        # From where to watch on; None: list first.
        version: str | None = None
        listed = time.monotonic()
        while not self._stopping.is_set():
            try:
                if version is None or time.monotonic() >= self._relist_at:
                    version = self._list()
                    listed = time.monotonic()
                version = self._watch(version)
                failures, logged = 0, ""
            except Exception as error:  # whatever the server, the network and the client make of it
                if self._stopping.is_set():
                    return
                # One that worked for long, and then does not, is asked again at once.
                worked = version is not None and time.monotonic() - listed > LONGEST_PAUSE
                version, failures = None, 0 if worked else failures + 1
                why = reason_of(error)
                level = log.debug if why == logged else log.warning
                level("the cluster's objects are to be listed again", why=why)
                logged = why
                pause = backoff(FIRST_PAUSE, failures, LONGEST_PAUSE)
                self._stopping.wait(pause * random.uniform(0.5, 1.0))

    def _list(self) -> str:
        """Takes all objects; returns the version to watch from."""
        response = self._list_call(_preload_content=False, _request_timeout=(CONNECT_TIMEOUT, LIST_TIMEOUT))
        listed = json.loads(response.data)
        version = str(listed["metadata"]["resourceVersion"])
        objects: dict[str, T] = {}
        for raw in listed["items"]:
            objects |= self._parsed(raw)
        self._heard = time.monotonic()
        self._relist_at = self._heard + self._relist_interval * random.uniform(1 - JITTER, 1)
        self._take(objects)
        return version

    def _watch(self, version: str) -> str:
        """Takes what happens from `version` on, until the watch's regular end; returns where that was."""
        begun = time.monotonic()
        seconds = max(1, round(min(self._watch_timeout, self._relist_at - begun)))
        over = self._silence_timeout - self._watch_timeout
        response = self._list_call(
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=seconds,
            _preload_content=False,
            _request_timeout=(CONNECT_TIMEOUT, seconds + over),
        )
        self._watching = response
        try:
            if self._stopping.is_set():
                return version
            self._heard = time.monotonic()
            for event in _events(response):
                self._heard = time.monotonic()
                version = self._take_event(event)
                if self._heard > begun + seconds + over:
                    return version  # The server does not end it.
                if self._stopping.is_set():
                    return version
        finally:
            self._watching = None
            # It may not be at its end, so that the connection cannot be used again.
            response.close()
        if time.monotonic() - begun < SHORTEST_WATCH and not self._stopping.is_set():
            raise WatchError("the API server ended a watch at once")
        self._heard = time.monotonic()
        return version

    def _take_event(self, event: dict[str, Any]) -> str:
        """Returns its version. Raises WatchError for one that says that the watch failed."""
        kind, raw = event["type"], event["object"]
        if kind == "ERROR":
            raise WatchError(f"{raw.get('code')} {raw.get('reason')}: {raw.get('message')}")
        version = str(raw["metadata"]["resourceVersion"])
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            uid = raw["metadata"]["uid"]
            others = {key: value for key, value in self._objects.items() if key != uid}
            self._take(others if kind == "DELETED" else others | self._parsed(raw))
        return version

    def _take(self, objects: dict[str, T]) -> None:
        changed = not self._synced or objects != self._objects
        self._objects = MappingProxyType(objects)
        self._synced = True
        if changed and not self._stopping.is_set():
            try:
                self._tell()
            except Exception:
                log.exception("a change of the cluster's objects was not taken")

    def _parsed(self, raw: dict[str, Any]) -> dict[str, T]:
        """By its uid; nothing if it cannot be read."""
        try:
            return {raw["metadata"]["uid"]: self._parse(raw)}
        except Exception:
            log.exception(
                "an object of the cluster cannot be read and is left out", object=raw.get("metadata")
            )
            return {}


class WatchError(Exception):
    """The API server said that a watch failed, or ended it without need."""


def _events(response: urllib3.HTTPResponse) -> Iterator[dict[str, Any]]:
    """One for each line. Raises ValueError for what is no JSON, and what urllib3 raises."""
    for line in response:
        if line.strip():
            yield json.loads(line)
