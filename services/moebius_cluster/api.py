"""How the Kubernetes API is reached: from a pod by its service account, from elsewhere by a kubeconfig."""

import os
from pathlib import Path

from kubernetes import client, config

from moebius_cluster.errors import ClusterError

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def connect() -> client.ApiClient:
    """By the file that KUBECONFIG names; without it, in a pod, as its service account, whose token is read
    again as it is renewed; elsewhere by ~/.kube/config. Asks nothing yet. Raises ClusterError.

    A failure is told at once: callers have their own pauses.
    """
    configuration = client.Configuration()
    configuration.retries = False
    try:
        if _in_pod():
            config.load_incluster_config(client_configuration=configuration)
        else:
            config.load_kube_config(_kubeconfig(), client_configuration=configuration)
    except Exception as error:  # whatever the client makes of a faulty file
        raise ClusterError(
            f"the Kubernetes API cannot be reached: {error}. Outside of a pod, set KUBECONFIG"
        ) from error
    return client.ApiClient(configuration)


def own_namespace() -> str:
    """That of the kubeconfig's current context or, in a pod without one, the pod's. Raises ClusterError."""
    if _in_pod():
        return _NAMESPACE_FILE.read_text().strip()
    try:
        _, current = config.list_kube_config_contexts(_kubeconfig())
    except Exception as error:  # whatever the client makes of a faulty file
        raise ClusterError(f"no namespace is known: {error}. Name it") from error
    return current["context"].get("namespace") or "default"


def _in_pod() -> bool:
    return "KUBECONFIG" not in os.environ and _NAMESPACE_FILE.exists()


def _kubeconfig() -> str:
    return os.environ.get("KUBECONFIG", "~/.kube/config")
