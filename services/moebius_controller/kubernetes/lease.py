"""Who of several controllers acts: the holder of a Lease (coordination.k8s.io/v1).

The holder renews it three times in its duration. Others take it when they have seen no change for its whole
duration, by their own clocks, so that clocks that differ do no harm; a holder that could not renew it stops
to act before that. Writes carry the version that was read: of two who take it at once, one is refused.
"""

import json
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import structlog
from kubernetes import client

from moebius_cluster.failures import FAILURES, reason_of

TIMEOUTS = (3.0, 5.0)

log = structlog.get_logger(__name__)


class Lease:
    """Kept by a thread of its own, so that nothing that takes long loses it."""

    def __init__(
        self,
        api: client.ApiClient,
        namespace: str,
        name: str,
        identity: str,
        duration: float,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change`: called from the thread when this controller begins or ceases to lead."""
        self._leases = client.CoordinationV1Api(api)
        self._namespace = namespace
        self._name = name
        self._identity = identity
        self._duration = duration
        self._tell = on_change
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        # On the clock of time.monotonic(): until when it is ours for certain.
        self._until = 0.0
        self._term = 0
        self._logged = ""
        # What another holder wrote last, and when it was first seen.
        self._seen: tuple[Any, ...] = ()
        self._seen_at = 0.0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Gives it back, so that another one need not wait; takes a moment."""
        self._stopping.set()
        self._thread.join(2 * sum(TIMEOUTS))

    @property
    def leading(self) -> bool:
        return time.monotonic() < self._until

    @property
    def term(self) -> int:
        """How often this controller has begun to lead."""
        return self._term

    def _run(self) -> None:
        while not self._stopping.wait(self._turn()):
            pass
        if self.leading:
            self._until = 0.0
            try:
                self._give_back()
            except FAILURES as error:
                log.info("the lease is not given back, and will run out", why=reason_of(error))

    def _turn(self) -> float:
        """Takes or renews it, if it can be had; returns the seconds until the next try."""
        led, begun = self.leading, time.monotonic()
        try:
            ours = self._take()
            self._logged = ""
        except Exception as error:  # whatever the server makes of it: without this thread nobody leads
            ours, why = False, reason_of(error)
            tell = log.debug if why == self._logged else log.warning
            tell("the lease cannot be read or written", why=why)
            self._logged = why
        if ours:
            if not self.leading:
                self._term += 1
                log.info("leading", identity=self._identity, term=self._term)
            self._until = begun + self._duration * 2 / 3
        if led != self.leading:
            self._tell()
        pause = self._duration / 3 if ours else min(self._duration / 3, 2.0)
        # What took long took it from the time for which it is ours.
        return max(0.0, begun + pause - time.monotonic())

    def _take(self) -> bool:
        """Whether it is ours now."""
        try:
            lease = self._call(self._leases.read_namespaced_lease, self._name)
        except client.ApiException as error:
            if error.status != 404:
                raise
            return self._write(self._leases.create_namespaced_lease, (), {}, {})
        spec = lease.get("spec") or {}
        holder = spec.get("holderIdentity")
        if holder not in (None, "", self._identity) and not self._run_out(spec):
            self._until = 0.0
            return False
        return self._write(
            self._leases.replace_namespaced_lease,
            (self._name,),
            lease["metadata"],
            spec,
        )

    def _run_out(self, spec: dict[str, Any]) -> bool:
        """Whether its holder has not renewed it for as long as it said that it would at most take."""
        seen = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        return now - self._seen_at >= (spec.get("leaseDurationSeconds") or self._duration)

    def _write(
        self,
        call: Callable[..., Any],
        arguments: tuple[str, ...],
        metadata: dict[str, Any],
        before: dict[str, Any],
    ) -> bool:
        now = micro_time(datetime.now(UTC))
        renewed = before.get("holderIdentity") == self._identity
        spec = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": round(self._duration),
            "acquireTime": before.get("acquireTime", now) if renewed else now,
            "renewTime": now,
            "leaseTransitions": (before.get("leaseTransitions") or 0) + (not renewed),
        }
        return self._put(call, arguments, metadata, spec)

    def _give_back(self) -> None:
        lease = self._call(self._leases.read_namespaced_lease, self._name)
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") == self._identity:
            given = {**spec, "holderIdentity": "", "renewTime": micro_time(datetime.now(UTC))}
            self._put(self._leases.replace_namespaced_lease, (self._name,), lease["metadata"], given)

    def _put(
        self,
        call: Callable[..., Any],
        arguments: tuple[str, ...],
        metadata: dict[str, Any],
        spec: dict[str, Any],
    ) -> bool:
        """False if somebody else was faster."""
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace, **metadata},
            "spec": spec,
        }
        try:
            self._call(call, *arguments, body=body)
        except client.ApiException as error:
            if error.status != 409:
                raise
            return False
        return True

    def _call(self, call: Callable[..., Any], *arguments: str, **more: Any) -> dict[str, Any]:
        response = call(
            *arguments, namespace=self._namespace, _preload_content=False, _request_timeout=TIMEOUTS, **more
        )
        answer: dict[str, Any] = json.loads(response.data)
        return answer


def micro_time(when: datetime) -> str:
    """As the API wants times of Leases: with six digits after the point. The client takes them apart and puts
    them together again, and leaves the digits out when they are 0.
    """
    return when.replace(microsecond=when.microsecond or 1).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
