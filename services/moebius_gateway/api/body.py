"""From the bytes of a request to its parameters; every fault is a 400 that names the parameter."""

import asyncio
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from moebius_gateway.api.errors import INVALID_REQUEST, ApiError, invalid
from moebius_gateway.api.interruption import ClientGoneError

# A client's own words come back to it up to this length.
MAX_PARAM = 128
# Up to so many bytes (some milliseconds) a body is parsed on the event loop.
INLINE_BYTES = 256 << 10
# Objects and lists in one another; much deeper ones could not be written again.
MAX_NESTING = 100
# A body that takes longer, in seconds, is not on its way any more; it must not hold up a gateway that stops.
BODY_SECONDS = 30.0

Parameters = TypeVar("Parameters", bound=BaseModel)


async def parse(request: Request, parameters: type[Parameters]) -> Parameters:
    """Reads and validates the JSON body. Raises `ApiError` and `ClientGoneError`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise invalid(f"send JSON with Content-Type: application/json, not {content_type or 'none'!r}")
    body = await _read(request)
    if len(body) > INLINE_BYTES:
        return await asyncio.to_thread(_parse, body, parameters)
    return _parse(body, parameters)


async def _read(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await request.body()
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_SECONDS:g} seconds"
        raise ApiError(408, message, INVALID_REQUEST, code="request_timeout") from error
    except ClientDisconnect as error:
        raise ClientGoneError from error


def _parse(body: bytes, parameters: type[Parameters]) -> Parameters:
    try:
        data = orjson.loads(body)
        if body.count(b"{") + body.count(b"[") > MAX_NESTING and nesting(data) > MAX_NESTING:
            raise invalid(f"the body is nested deeper than {MAX_NESTING}")
        return parameters.model_validate(data)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except ValidationError as error:
        raise _refusal(error) from error


def nesting(data: Any) -> int:
    """How many objects and lists stand in one another."""
    depth, level = 0, [data]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    return depth


def _refusal(error: ValidationError) -> ApiError:
    fault = error.errors(include_url=False)[0]
    # A check on the object as a whole says itself which key it is about.
    keys = [*fault["loc"], *([name] if (name := fault.get("ctx", {}).get("name")) else [])]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    param = path.removeprefix(".")[:MAX_PARAM]
    match fault["type"]:
        case "extra_forbidden":
            return invalid(f"unknown parameter: '{param}'", param, "unknown_parameter")
        case "missing":
            return invalid(f"missing required parameter: '{param}'", param, "missing_required_parameter")
        case "unsupported":
            return invalid(f"'{param}' is not supported yet", param, "unsupported_parameter")
        case "model_type":
            what = f"'{param}'" if param else "the body"
            return invalid(f"{what} is not an object", param or None)
        case _:
            about = f"invalid value for '{param}': " if param else ""
            return invalid(about + fault["msg"], param or None)
