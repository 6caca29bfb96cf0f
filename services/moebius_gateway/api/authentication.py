"""From a request's headers to its client."""

from starlette.datastructures import Headers

from moebius_gateway.admission.limits import Client
from moebius_gateway.api.errors import ApiError
from moebius_gateway.auth.key_ring import KeyRing

# For probes; they tell nothing that is worth a key.
OPEN = frozenset({"/livez", "/healthz", "/readyz", "/health", "/accepting"})


def authenticate(headers: Headers, keys: KeyRing) -> Client:
    """Raises `ApiError`. Both OpenAI's and Anthropic's way to say the key are understood."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
    client = keys.client(given or None)
    if client is not None:
        return client
    wrong = "this API key is not valid" if given else "an API key is needed: Authorization: Bearer KEY"
    raise ApiError(401, wrong, "authentication_error", code="invalid_api_key")
