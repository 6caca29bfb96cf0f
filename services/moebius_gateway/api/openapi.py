"""GET /openapi.json: what this gateway takes and gives, generated from the classes that parse requests.

A parameter that is refused is in it too, with the values that it may have all the same. What a schema cannot
say (which of two parameters excludes the other, whether a JSON schema can be enforced) is answered with 400.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import APIRouter
from pydantic.json_schema import GenerateJsonSchema, models_json_schema
from pydantic_core import core_schema
from starlette.responses import Response

from moebius_gateway.api.errors import is_anthropic
from moebius_gateway.api.openapi_answers import ANSWERS
from moebius_gateway.api.parameter_table import BODIES
from moebius_gateway.api.strict import ANYTHING, Strict

Json = dict[str, Any]
NULL: Json = {"type": "null"}
# Any request may be answered with these: without a valid key, with headers that are too large, by a defect.
ALWAYS = {401: "no valid API key", 431: "headers too large", 500: "a defect, or a request that kills engines"}
# So may those with a body.
OF_BODIES = {
    400: "a parameter is wrong, unknown or unsupported",
    404: "no such model, or no such response",
    408: "the body did not arrive",
    413: "the body is too large",
    429: "too many requests, or queues are full",
    503: "nothing can serve it now",
}
NOT_FOUND = {404: OF_BODIES[404]}
STORED = {400: OF_BODIES[400], 404: OF_BODIES[404]}
# Names of models may contain slashes, which OpenAPI's paths cannot say: they are written %2F there.
MODEL = {"model_id": {"type": "string", "minLength": 1}}
RESPONSE = {"id_": {"type": "string", "minLength": 1, "pattern": "^[A-Za-z0-9_]+$"}}
PAGE: dict[str, Json] = {
    "order": {"enum": ["asc", "desc"]},
    "limit": {"type": "integer", "minimum": 1, "maximum": 100},
    "after": {"type": "string"},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """`answer` names a schema of openapi_answers; `streams`: it can also be had as events."""

    summary: str
    answer: str
    statuses: Mapping[int, str]
    path: Mapping[str, Json] | None = None
    query: Mapping[str, Json] | None = None
    streams: bool = False


OPERATIONS: Mapping[str, Operation] = {
    "POST /v1/chat/completions": Operation("OpenAI's chat", "ChatCompletionAnswer", OF_BODIES, streams=True),
    "POST /v1/completions": Operation(
        "OpenAI's plain completion", "CompletionAnswer", OF_BODIES, streams=True
    ),
    "POST /v1/responses": Operation("OpenAI's responses", "ResponseAnswer", OF_BODIES, streams=True),
    "POST /v1/responses/input_tokens": Operation("What a prompt would cost", "InputTokensAnswer", OF_BODIES),
    "GET /v1/responses/{id_}": Operation("One that is kept", "ResponseAnswer", STORED, path=RESPONSE),
    "DELETE /v1/responses/{id_}": Operation("Forget it", "DeletedAnswer", STORED, path=RESPONSE),
    "POST /v1/responses/{id_}/cancel": Operation(
        "End one in the background", "ResponseAnswer", STORED | {429: OF_BODIES[429]}, path=RESPONSE
    ),
    "GET /v1/responses/{id_}/input_items": Operation(
        "What it was asked", "PageAnswer", STORED, path=RESPONSE, query=PAGE
    ),
    "POST /v1/messages": Operation("Anthropic's messages", "MessageAnswer", OF_BODIES, streams=True),
    "POST /v1/messages/count_tokens": Operation("What a prompt would cost", "CountAnswer", OF_BODIES),
    "POST /tokenize": Operation("Text or messages to token ids", "TokenizedAnswer", OF_BODIES),
    "POST /v1/tokenize": Operation("Text or messages to token ids", "TokenizedAnswer", OF_BODIES),
    "POST /detokenize": Operation("Token ids to text", "DetokenizedAnswer", OF_BODIES),
    "POST /v1/detokenize": Operation("Token ids to text", "DetokenizedAnswer", OF_BODIES),
    "GET /v1/models": Operation("What is served", "ModelsAnswer", {}),
    "GET /v1/models/{model_id}": Operation(
        "One of them", "ModelAnswer", NOT_FOUND | {503: OF_BODIES[503]}, path=MODEL
    ),
    "GET /livez": Operation("200 while the process runs", "AliveAnswer", {}),
    "GET /healthz": Operation("The same", "AliveAnswer", {}),
    "GET /readyz": Operation("200 when a model can be served", "ReadinessAnswer", {503: "none can be"}),
    "GET /health": Operation(
        "The same, where serving engines have it", "ReadinessAnswer", {503: "none can be"}
    ),
    "GET /accepting": Operation(
        "200 when requests should come here: those without a worker wait", "AcceptingAnswer", {503: "not now"}
    ),
    "GET /openapi.json": Operation("This document", "Document", {}),
}


# What probes answer with 503.
UNREADY = {"/readyz": "ReadinessAnswer", "/health": "ReadinessAnswer", "/accepting": "AcceptingAnswer"}


class RequestSchemas(GenerateJsonSchema):
    """As `Strict` validates: `null` is the same as leaving out, refused parameters have neutral values."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> Json:
        described = super().model_schema(schema)
        described.pop("title", None)
        body = schema["cls"]
        if not issubclass(body, Strict):
            return described
        properties = described.setdefault("properties", {})
        for name in properties.keys() - set(described.get("required", ())):
            properties[name] = _or_null(properties[name])
        return described | {"properties": properties | {n: _neutral(v) for n, v in body.neutral.items()}}


def _or_null(schema: Json) -> Json:
    about = {key: schema[key] for key in ("description", "default") if schema.get(key) not in (None, [], {})}
    rest = {key: value for key, value in schema.items() if key not in ("description", "default")}
    if not rest:
        return about
    options = [option for option in rest.get("anyOf", [rest]) if option != NULL]
    return about | {"anyOf": [*options, NULL]}


def _neutral(values: tuple[Any, ...]) -> Json:
    if ANYTHING in values:
        return {"description": "Changes nothing here."}
    return {"description": "Not supported: values that change nothing.", "enum": [*values, None]}


def document() -> Json:
    bodies = sorted(set(BODIES.values()), key=lambda body: body.__name__)
    names, definitions = models_json_schema(
        [(body, "validation") for body in bodies],
        ref_template="#/components/schemas/{model}",
        schema_generator=RequestSchemas,
    )
    schemas = definitions["$defs"] | ANSWERS
    references = {body: names[body, "validation"] for body in bodies}
    paths: dict[str, Json] = {}
    for name, operation in OPERATIONS.items():
        method, path = name.split(" ")
        body = BODIES.get(name) or BODIES.get(name.replace("/v1/", "/"))
        reference = None if body is None else references[body]
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, reference)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Moebius", "version": version("moebius"), "description": "See docs/api.md."},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # Without keys configured nobody needs one.
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


def _operation(path: str, operation: Operation, body: Any) -> Json:
    content = {"application/json": _named(operation.answer)}
    if operation.streams:
        # No schema: to some readers it is that of the text, to others that of each event.
        content |= {"text/event-stream": {}}
    described: Json = {
        "summary": operation.summary,
        "parameters": [
            *(_parameter("path", name, schema) for name, schema in (operation.path or {}).items()),
            *(_parameter("query", name, schema) for name, schema in (operation.query or {}).items()),
        ],
        "responses": {"200": {"description": "As asked", "content": content}}
        | {
            str(status): {"description": why, "content": {"application/json": _refusal(path, status)}}
            for status, why in sorted((ALWAYS | dict(operation.statuses)).items())
        },
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return described


def _refusal(path: str, status: int) -> Json:
    if path in UNREADY and status == 503:
        return _named(UNREADY[path])
    return _named("AnthropicError" if is_anthropic(path) else "Error")


def _named(schema: str) -> Json:
    return {"schema": {"$ref": f"#/components/schemas/{schema}"}}


def _parameter(place: str, name: str, schema: Json) -> Json:
    return {"in": place, "name": name, "required": place == "path", "schema": schema}


def openapi_router() -> APIRouter:
    router = APIRouter()
    written = orjson.dumps(document())

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(written, media_type="application/json")

    return router
