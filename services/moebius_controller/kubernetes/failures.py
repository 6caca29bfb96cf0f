"""What calls of the Kubernetes API raise when they fail, whoever's fault it is."""

import urllib3
from kubernetes import client

# ValueError: an answer that is no JSON.
FAILURES = (client.ApiException, urllib3.exceptions.HTTPError, OSError, ValueError)


def reason_of(error: BaseException) -> str:
    """For people, in a line."""
    if isinstance(error, client.ApiException):
        return f"{error.status} {error.reason}"
    if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason is not None:
        error = error.reason
    return str(error).partition("\n")[0] or type(error).__name__
