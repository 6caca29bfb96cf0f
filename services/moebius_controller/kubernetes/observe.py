"""What the controller decides on, made of pods, nodes and what workers answer. Pure functions."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moebius_cluster.pods import Container, ContainerState, Pod
from moebius_common.exit_reason import exit_reason
from moebius_controller.kubernetes.nodes import Node
from moebius_controller.types import Health, Observation

CONTAINER = "worker"
PORT = "grpc"
LEVEL = "moebius.dev/fallback-level"
LEVEL_REASON = "moebius.dev/fallback-reason"
MODEL = "moebius.dev/model"
INSTANCE = "app.kubernetes.io/instance"
# The revision of pods that are no StatefulSet's.
TEMPLATE_HASH = "pod-template-hash"

# A pod's runs are numbered by when it was created, in seconds, and how often its container was restarted:
# they grow from pod to pod of the same name, and a controller without a memory finds the same.
RUN_BITS = 20
# So that the next pod of that name is created in another second.
YOUNGEST = 1.0
# How the kubelet waits for the next start of a container: twice as long each time.
FIRST_BACK_OFF = 10.0
LONGEST_BACK_OFF = 300.0
_BACK_OFF = re.compile(r"back-off (?:(\d+)m)?(\d+)s")


@dataclass(frozen=True, slots=True)
class Answers:
    """What the worker in a pod says."""

    health: Health | None
    silence: float


def worker_of(pod: Pod) -> Container:
    return pod.container(CONTAINER) or Container(CONTAINER)


def runs(pod: Pod) -> bool:
    """Whether there is somebody who could answer."""
    return pod.phase == "Running" and worker_of(pod).state is ContainerState.RUNNING


def observe(
    pods: Iterable[Pod],
    nodes: Mapping[str, Node] | None,
    answers: Mapping[str, Answers],
    now: float,
) -> list[Observation]:
    """One for each worker. `nodes`: by name, None if they are not known; `answers`: by the pod's uid.

    Of several pods of one name, which a relist can show for a moment, the last one is the worker.
    """
    by_name: dict[str, Pod] = {}
    for pod in sorted(pods, key=lambda pod: pod.created_at):
        by_name[pod.name] = pod
    revisions: dict[str, set[str]] = {}
    for pod in by_name.values():
        if pod.deletion is None:
            revisions.setdefault(_group(pod), set()).add(_revision(pod))
    return [
        _observe(pod, nodes, answers.get(pod.uid), len(revisions.get(_group(pod), ())) > 1, now)
        for pod in by_name.values()
    ]


def _observe(
    pod: Pod, nodes: Mapping[str, Node] | None, answers: Answers | None, rolling: bool, now: float
) -> Observation:
    container = worker_of(pod)
    death, restart_in = _death(pod, container)
    answers = answers if answers is not None and death is None else Answers(None, 0.0)
    node = nodes.get(pod.node) if nodes is not None else None
    lost = nodes is not None and bool(pod.node) and (node is None or not node.ready)
    return Observation(
        worker=pod.name,
        run=run_of(pod),
        death=death,
        health=answers.health,
        silence=answers.silence,
        restarts=container.restart_count,
        level=level_of(pod),
        revision=_revision(pod),
        group=_group(pod),
        kept=True,
        restart_in=restart_in,
        vouched=pod.ready,
        held=_held(pod, container, death, node, now),
        going=pod.deletion is not None,
        overdue=now - pod.deletion if lost and pod.deletion is not None else None,
        rolling=rolling,
        node=pod.node,
        node_fault=node.fault if node is not None else "",
    )


def run_of(pod: Pod) -> int:
    return int(pod.created_at) << RUN_BITS | worker_of(pod).restart_count


def level_of(pod: Pod) -> int:
    written = pod.annotations.get(LEVEL, "")
    return int(written) if written.isdecimal() else 0


def _death(pod: Pod, container: Container) -> tuple[str | None, float | None]:
    """How the pod's last run ended, if it did, and after how long the kubelet starts the next."""
    if pod.over:
        why = ": ".join(part for part in (pod.reason, pod.message) if part)
        return why or _ended(container.exit_code, container.reason, container.message), None
    if container.state is ContainerState.TERMINATED:
        return _ended(container.exit_code, container.reason, container.message), 0.0
    if container.state is ContainerState.WAITING and container.reason == "CrashLoopBackOff":
        death = _ended(container.last_exit_code, container.last_reason, container.last_message)
        return death, _back_off(container)
    return None, None


def _ended(code: int | None, reason: str, message: str) -> str:
    # A container that a signal ended has 128 more than its number.
    text = "its container ended"
    if code is not None:
        text = "it " + exit_reason(128 - code if code > 128 else code)
    if reason not in ("", "Error", "Completed"):
        text += f" ({reason})"
    last_words = message.strip().rpartition("\n")[2]
    return text + (f": {last_words}" if last_words else "")


def _back_off(container: Container) -> float:
    """Seconds, from the death on."""
    said = _BACK_OFF.search(container.message)
    if said is not None:
        return 60.0 * int(said[1] or 0) + int(said[2])
    return min(FIRST_BACK_OFF * 2.0 ** min(container.restart_count - 1, 10), LONGEST_BACK_OFF)


def _held(pod: Pod, container: Container, death: str | None, node: Node | None, now: float) -> str:
    if 0 <= now - pod.created_at < YOUNGEST:
        return "it is new"
    if death is None and not runs(pod):
        return f"it waits: {container.reason or pod.reason or pod.phase}"
    if death is None and node is not None and not node.ready:
        return "its node is not heard, and may come back"
    return ""


def _revision(pod: Pod) -> str:
    return pod.revision or pod.labels.get(TEMPLATE_HASH, "")


def _group(pod: Pod) -> str:
    return f"{pod.labels.get(INSTANCE, '')}/{pod.labels.get(MODEL, '')}"
