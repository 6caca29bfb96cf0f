"""A Kubernetes API server in miniature, for the faults that a real one does not show on demand.

It keeps objects of any kind by their paths, and answers list, watch, get, create, replace, patch and delete
as the real one does, as far as reflectors, leases and actions can tell: resource versions, conflicts, uid
preconditions, graceful deletion of pods, label selectors, bookmarks, 410.

    with FakeApi() as api:
        api.put("/api/v1/namespaces/default/pods", pod("w-0", ip="10.0.0.1"))
        core = client.CoreV1Api(api.client())
        api.drop_watches()
"""

import copy
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from kubernetes import client

from tests.cluster_http import Asked, Faults, Object, Server, line, status

PODS = "/api/v1/namespaces/default/pods"


def pod(
    name: str,
    ip: str | None = None,
    *,
    port: int = 7601,
    labels: dict[str, str] | None = None,
    phase: str = "Running",
    **metadata: Any,
) -> Object:
    """A worker's pod as the API gives it; the fake fills in what a server would."""
    running = {"running": {"startedAt": now()}} if phase == "Running" else {"waiting": {"reason": phase}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {"app": "worker"}, **metadata},
        "spec": {
            "nodeName": "node-0",
            "containers": [
                {
                    "name": "worker",
                    "image": "moebius/worker:1",
                    "ports": [
                        {"name": "grpc", "containerPort": port, "protocol": "TCP"},
                        {"name": "metrics", "containerPort": 9401, "protocol": "TCP"},
                    ],
                }
            ],
        },
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if phase == "Running" else "False"}],
            "containerStatuses": [
                {
                    "name": "worker",
                    "image": "moebius/worker:1",
                    "imageID": "sha256:1",
                    "state": running,
                    "lastState": {},
                    "ready": phase == "Running",
                    "restartCount": 0,
                }
            ],
        },
    }


def now(after: float = 0.0) -> str:
    """As the API writes times."""
    return (datetime.now(UTC) + timedelta(seconds=after)).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class _Change:
    version: int
    # None: a line of `raw` for everybody.
    path: str | None
    before: Object | None
    after: Object | None
    raw: bytes = b""


@dataclass
class FakeApi:
    faults: Faults = field(default_factory=Faults)
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._objects: dict[str, Object] = {}
        self._changes: list[_Change] = []
        self._version = 1
        # Watches begun before are cut off.
        self.epoch = 0
        self._server: Server | None = None
        self.port = 0

    def __enter__(self) -> "FakeApi":
        self.come()
        return self

    def __exit__(self, *_: object) -> None:
        self.go()

    # ---- controls -------------------------------------------------------------------------------------

    def come(self) -> None:
        """Listens (again), at the address that it had."""
        self._server = Server(self, self.port)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def go(self) -> None:
        """Is away: refuses connections, and those that are there end."""
        self.drop_watches()
        if self._server is not None:
            self._server.shutdown()
            self._server.closed = True
            self._server.server_close()
            self._server = None

    def drop_watches(self) -> None:
        """Cuts the connections of all watches off, in the middle of what they say."""
        with self._changed:
            self.epoch += 1
            self._changed.notify_all()

    def say(self, raw: bytes) -> None:
        """A line on all watches, whatever it is."""
        with self._changed:
            self._version += 1
            self._changes.append(_Change(self._version, None, None, None, raw))
            self._changed.notify_all()

    def forget(self) -> None:
        """Changes so far are not told any more: who watches from before gets 410."""
        with self._changed:
            self._version += 1
            self._changes.clear()

    def client(self) -> client.ApiClient:
        configuration = client.Configuration(host=f"http://127.0.0.1:{self.port}")
        configuration.retries = False
        return client.ApiClient(configuration)

    def watches(self) -> int:
        """That were ever asked for."""
        return sum("watch" in one.query for one in self.asked)

    # ---- objects --------------------------------------------------------------------------------------

    def put(self, collection: str, obj: Object) -> Object:
        """Creates or replaces it, as a kubelet or a controller would; returns it as it is then."""
        path = f"{collection}/{obj['metadata']['name']}"
        with self._changed:
            before = self._objects.get(path)
            metadata = {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            if before is not None:
                metadata = {key: before["metadata"][key] for key in metadata}
            parts = collection.split("/")
            if "namespaces" in parts[:-1]:
                metadata["namespace"] = parts[parts.index("namespaces") + 1]
            self._version += 1
            after = copy.deepcopy(obj)
            after["metadata"] = {**metadata, **after["metadata"], "resourceVersion": str(self._version)}
            self._objects[path] = after
            self._record(path, before, after)
            return copy.deepcopy(after)

    def change(self, path: str, edit: Callable[[Object], object]) -> Object:
        with self._changed:
            obj = copy.deepcopy(self._objects[path])
            edit(obj)
            return self.put(path.rpartition("/")[0], obj)

    def remove(self, path: str) -> None:
        with self._changed:
            self._version += 1
            self._record(path, self._objects.pop(path), None)

    def get(self, path: str) -> Object | None:
        with self._changed:
            return copy.deepcopy(self._objects.get(path))

    def objects(self, collection: str) -> list[Object]:
        with self._changed:
            return [copy.deepcopy(obj) for path, obj in self._objects.items() if _within(path, collection)]

    def _record(self, path: str, before: Object | None, after: Object | None) -> None:
        self._changes.append(_Change(self._version, path, before, after))
        self._changed.notify_all()

    # ---- answers --------------------------------------------------------------------------------------

    def listed(self, collection: str, selector: str) -> Object:
        with self._changed:
            items = [obj for obj in self.objects(collection) if _selected(obj, selector)]
            return {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": items}

    def expired(self, version: int) -> bool:
        with self._changed:
            oldest = self._changes[0].version if self._changes else self._version + 1
            return version + 1 < oldest and version < self._version

    def events(
        self, collection: str, selector: str, version: int, seconds: float, epoch: int
    ) -> Iterator[bytes]:
        """Lines of a watch that was asked for in this epoch; ends at its time, or when it is cut off."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with self._changed:
                news = [one for one in self._changes if one.version > version]
                if not news and self.epoch == epoch:
                    self._changed.wait(left)
                if self.epoch != epoch:
                    raise ConnectionAbortedError
                version = news[-1].version if news else version
            for one in () if self.faults.silent else news:
                yield from [one.raw] if one.path is None else _event(one, collection, selector)
        if self.faults.bookmarks:
            yield line("BOOKMARK", {"metadata": {"resourceVersion": str(version)}})

    def delete(self, path: str, options: Object) -> tuple[int, Object]:
        """Pods get their grace, then somebody has to `remove` them; with grace 0 they are gone at once."""
        with self._changed:
            obj = self._objects.get(path)
            if obj is None:
                return status(404, "NotFound")
            wanted = (options.get("preconditions") or {}).get("uid")
            if wanted not in (None, obj["metadata"]["uid"]):
                return status(409, "Conflict")
            grace = options.get("gracePeriodSeconds", 30 if obj.get("kind") == "Pod" else 0)
            if grace == 0:
                self.remove(path)
                return 200, obj
            return 200, self.change(path, lambda one: one["metadata"].update(deletionTimestamp=now(grace)))

    def replace(self, path: str, obj: Object) -> tuple[int, Object]:
        with self._changed:
            before = self._objects.get(path)
            if before is None:
                return status(404, "NotFound")
            wanted = obj["metadata"].get("resourceVersion")
            if wanted not in (None, before["metadata"]["resourceVersion"]):
                return status(409, "Conflict")
            return 200, self.put(path.rpartition("/")[0], obj)

    def patch(self, path: str, patch: Object) -> tuple[int, Object]:
        """A merge patch; what it names in metadata.uid and resourceVersion is a precondition."""
        with self._changed:
            before = self._objects.get(path)
            if before is None:
                return status(404, "NotFound")
            for key in ("uid", "resourceVersion"):
                if patch.get("metadata", {}).get(key) not in (None, before["metadata"][key]):
                    return status(409, "Conflict")
            return 200, self.put(path.rpartition("/")[0], _merged(before, patch))

    def create(self, collection: str, obj: Object) -> tuple[int, Object]:
        with self._changed:
            metadata = obj["metadata"]
            if "name" not in metadata:
                metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
            if f"{collection}/{metadata['name']}" in self._objects:
                return status(409, "AlreadyExists")
            return 201, self.put(collection, obj)


def _event(change: _Change, collection: str, selector: str) -> Iterator[bytes]:
    """As somebody sees it who looks at this only."""
    if not _within(change.path or "", collection):
        return
    before = change.before if change.before and _selected(change.before, selector) else None
    after = change.after if change.after and _selected(change.after, selector) else None
    if after is not None:
        yield line("ADDED" if before is None else "MODIFIED", after)
    elif before is not None:
        gone = copy.deepcopy(change.after or before)
        gone["metadata"]["resourceVersion"] = str(change.version)
        yield line("DELETED", gone)


def _selected(obj: Object, selector: str) -> bool:
    labels = obj["metadata"].get("labels") or {}
    wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
    return all(labels.get(key) == value for key, value in wanted.items())


def _within(path: str, collection: str) -> bool:
    return path.rpartition("/")[0] == collection


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged
