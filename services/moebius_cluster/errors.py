"""What can go wrong before anything is asked of the Kubernetes API. Imports no client of it."""


class ClusterError(Exception):
    """Nothing says how to reach the API. The message is for people."""
