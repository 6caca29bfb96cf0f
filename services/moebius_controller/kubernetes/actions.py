"""What is said to the Kubernetes API. Functions that wait for it, called in threads.

Each names the uid of what it is about: another pod or node of the same name is never touched.
"""

import re
import time
import uuid
from datetime import UTC, datetime
from typing import Any

from kubernetes import client

from moebius_cluster.pods import Pod
from moebius_controller.events import WHAT, shortened, tell
from moebius_controller.kubernetes.nodes import MARK, MARK_TEXT, MARK_TIME, Node
from moebius_controller.kubernetes.observe import LEVEL, LEVEL_REASON
from moebius_controller.types import Action, GiveUp, MarkNode, Replace, SetLevel, Start

TIMEOUTS = (3.0, 10.0)
# Seconds that a container which does not serve any more has to end.
SHORT_GRACE = 1
COMPONENT = "moebius-controller"


class Actions:
    def __init__(self, api: client.ApiClient, namespace: str, cordon: bool) -> None:
        self._core = client.CoreV1Api(api)
        self._namespace = namespace
        self._cordon = cordon

    def carry_out(self, action: Action, pod: Pod, node: Node | None) -> None:
        """Raises one of FAILURES. 404 and 409 say that the pod or node is another one by now."""
        match action:
            case Replace():
                self._delete(pod, 0 if action.force else None if action.drain else SHORT_GRACE)
            case SetLevel():
                self._annotate(pod, {LEVEL: str(action.level), LEVEL_REASON: shortened(action.cause.reason)})
            case MarkNode():
                if node is None:
                    raise client.ApiException(404, "the node is not there")
                self._mark(node, action.cause.reason)
            case GiveUp():
                pass
            case Start():
                raise ValueError("pods are started by whoever keeps them")

    def tell(self, action: Action, pod: Pod, node: Node | None) -> None:
        """An Event on what was acted on. Raises one of FAILURES."""
        now = datetime.now(UTC)
        about = client.V1ObjectReference(
            api_version="v1", kind="Pod", name=pod.name, namespace=pod.namespace, uid=pod.uid
        )
        namespace = self._namespace
        if isinstance(action, MarkNode) and node is not None:
            # Nodes are in no namespace; kubectl looks for their events by name and in this one.
            about = client.V1ObjectReference(api_version="v1", kind="Node", name=node.name, uid=node.name)
            namespace = "default"
        event = client.CoreV1Event(
            metadata=client.V1ObjectMeta(name=f"{about.name}.{uuid.uuid4().hex[:16]}", namespace=namespace),
            involved_object=about,
            type="Warning",
            reason="Worker" + WHAT[type(action)].title().replace(" ", ""),
            message=shortened(tell(action)),
            source=client.V1EventSource(component=COMPONENT),
            first_timestamp=now,
            last_timestamp=now,
            count=1,
        )
        self._core.create_namespaced_event(
            namespace, event, _request_timeout=TIMEOUTS, _preload_content=False
        )

    def _delete(self, pod: Pod, grace: int | None) -> None:
        self._core.delete_namespaced_pod(
            pod.name,
            self._namespace,
            body=client.V1DeleteOptions(
                grace_period_seconds=grace, preconditions=client.V1Preconditions(uid=pod.uid)
            ),
            _request_timeout=TIMEOUTS,
            _preload_content=False,
        )

    def _annotate(self, pod: Pod, annotations: dict[str, str]) -> None:
        # A uid that is not the pod's is refused.
        body = {"metadata": {"uid": pod.uid, "annotations": annotations}}
        self._core.patch_namespaced_pod(
            pod.name, self._namespace, body, _request_timeout=TIMEOUTS, _preload_content=False
        )

    def _mark(self, node: Node, reason: str) -> None:
        metadata = {
            "uid": node.uid,
            "labels": {MARK: slug(reason)},
            "annotations": {MARK_TEXT: shortened(reason), MARK_TIME: f"{time.time():.0f}"},
        }
        body: dict[str, Any] = {"metadata": metadata}
        if self._cordon:
            body["spec"] = {"unschedulable": True}
        self._core.patch_node(node.name, body, _request_timeout=TIMEOUTS, _preload_content=False)


def slug(reason: str) -> str:
    """A label's value: at most 63 letters, digits and dashes, of what follows the last colon."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", reason.rpartition(": ")[2])[:63].strip("-")
    return words or "fault"
