"""The command as a client of the gateway."""

import json
from collections.abc import AsyncIterator, Sequence

import httpx

from moebius_cli.errors import CliError

Message = dict[str, str]


def client(url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """For a gateway on this machine: no proxy stands between, and a stream may pause for long.

    `url`: also with the /v1 that clients of OpenAI's API want.
    """
    timeout = httpx.Timeout(600.0, connect=5.0)
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    base_url = url.rstrip("/").removesuffix("/v1")
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout, trust_env=False)


async def served_model(gateway: httpx.AsyncClient) -> str:
    """The name of the first model. Raises CliError if there is none or nobody answers."""
    try:
        response = await gateway.get("/v1/models")
        if response.is_error:
            raise CliError(_refusal(response.status_code, response.content))
        models = response.json()["data"]
    except (httpx.HTTPError, ValueError, KeyError) as error:
        raise CliError(
            f"No gateway answers at {gateway.base_url} ({error}). Start one: moebius up"
        ) from error
    if not models:
        raise CliError(f"The gateway at {gateway.base_url} knows no model yet: see moebius status")
    return str(models[0]["id"])


async def stream_chat(
    gateway: httpx.AsyncClient, model: str, messages: Sequence[Message], **parameters: object
) -> AsyncIterator[str]:
    """Yields the answer's text as it comes. Raises CliError with the gateway's own words."""
    body = {"model": model, "messages": list(messages), "stream": True, **parameters}
    try:
        async with gateway.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                raise CliError(_refusal(response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise CliError(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text
    except UnicodeEncodeError as error:
        raise CliError(
            "What was asked is not UTF-8: set the terminal, or what it comes from, to that"
        ) from error
    except httpx.HTTPError as error:
        raise CliError(f"The gateway at {gateway.base_url} did not finish: {error!r}") from error


def _refusal(status: int, body: bytes) -> str:
    """What the gateway, or a proxy before it, said."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP status {status}: {body[:200].decode(errors='replace')}"
