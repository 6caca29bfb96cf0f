"""GET /openapi.json says what there is: every route, every parameter, and what they really take."""

from typing import Any

import pytest

from moebius_gateway.api.openapi import ANSWERS, document
from moebius_gateway.api.parameter_table import BODIES
from moebius_gateway.app import build_app
from tests.gateway.http_server import Gateway


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema["$ref"].rpartition("/")[2]
    return document()["components"]["schemas"][name]


def operations(paths: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


@pytest.mark.asyncio(loop_scope="session")
async def test_every_route_is_in_it_and_no_other(chatty: Gateway) -> None:
    """FastAPI's own document, which is served nowhere, knows the routes."""
    paths = build_app(chatty.services).openapi()["paths"]
    assert operations(paths) - {("HEAD", path) for path in paths} == operations(document()["paths"])


@pytest.mark.asyncio(loop_scope="session")
async def test_it_is_served(chatty: Gateway) -> None:
    async with chatty.client() as client:
        answer = await client.get("/openapi.json")
    assert answer.json() == document()


def test_every_parameter_is_in_it() -> None:
    paths = document()["paths"]
    for name, body in BODIES.items():
        method, path = name.split(" ")
        schema = resolved(paths[path][method.lower()]["requestBody"]["content"]["application/json"]["schema"])
        fields = [field.alias or name for name, field in body.model_fields.items()]
        assert sorted(schema["properties"]) == sorted([*fields, *body.neutral])
        assert schema["additionalProperties"] == {"type": "null"}


def test_what_is_optional_may_be_null_and_what_is_required_may_not() -> None:
    chat = document()["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"type": "null"} in chat["n"]["anyOf"]
    assert "anyOf" not in chat["messages"]
    assert chat["best_of"]["enum"] == [1, None]
    assert {"type": "string", "minLength": 1, "maxLength": 1024} in chat["stop"]["anyOf"]


def test_names_of_bodies_and_answers_do_not_clash() -> None:
    schemas = document()["components"]["schemas"]
    assert all(schemas[name] == schema for name, schema in ANSWERS.items())
    assert all("$ref" not in str(schema) for schema in ANSWERS.values())


def test_errors_are_in_the_shape_of_their_api() -> None:
    for path, methods in document()["paths"].items():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                name = response["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                if status >= "400" and path not in ("/readyz", "/health", "/accepting"):
                    assert name == ("AnthropicError" if path.startswith("/v1/messages") else "Error")
