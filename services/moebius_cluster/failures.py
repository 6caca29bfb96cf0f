"""What calls of the Kubernetes API raise when they fail, whoever's fault it is."""

import contextlib
import json

import urllib3
from kubernetes import client

# ValueError: an answer that is no JSON.
FAILURES = (client.ApiException, urllib3.exceptions.HTTPError, OSError, ValueError)


def reason_of(error: BaseException) -> str:
    """For people, in a line; the same for the same cause: without addresses of objects in memory."""
    if isinstance(error, client.ApiException) and error.status:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            # Names the right that is missing, for example.
            return f"{error.status}: {json.loads(error.body or '')['message']}"
        return f"{error.status}: {error.reason}"
    if isinstance(error, urllib3.exceptions.HTTPError):
        return type(error).__name__
    return str(error).partition("\n")[0] or type(error).__name__
