"""API keys over HTTP: who is let in, where, and what is told of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from moebius_gateway.api.authentication import OPEN
from moebius_gateway.app import build_app
from moebius_gateway.auth.keys import hashed
from tests.gateway.http_server import MODEL, Gateway, ScriptedBackend, running_gateway, until_ready

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY, OTHER_KEY, SLOW_KEY, LOW_KEY = (f"sk-moebius-{letter * 43}" for letter in "kosl")
PLAIN: dict[str, Any] = {"model": MODEL.id, "prompt": [5, 6, 7]}
FILE = f"""
[[keys]]
name = "team-a"
hash = "{hashed(KEY)}"

[[keys]]
name = "team-b"
hash = "{hashed(OTHER_KEY)}"

[[keys]]
name = "slow"
hash = "{hashed(SLOW_KEY)}"
requests_per_minute = 2

[[keys]]
name = "low"
hash = "{hashed(LOW_KEY)}"
priority = "low"
tokens_per_minute = 60
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(FILE)
    async with running_gateway(ScriptedBackend(), api_keys=file) as gateway:
        await until_ready(gateway)
        yield gateway


async def ask(
    gateway: Gateway, key: str | None, path: str = "/v1/completions", **headers: str
) -> httpx.Response:
    async with gateway.client() as client:
        given = {} if key is None else {"Authorization": f"Bearer {key}"}
        return await client.post(path, json=PLAIN, headers=given | headers)


async def test_every_route_but_the_probes_needs_a_key(guarded: Gateway) -> None:
    documented = build_app(guarded.services).openapi()["paths"]
    paths = {path: {method.upper() for method in methods} for path, methods in documented.items()}
    assert {"/v1/chat/completions", "/v1/models", "/v1/messages", "/v1/responses"} <= paths.keys()
    async with guarded.client() as client:
        for path, methods in {**paths, "/metrics": {"GET"}, "/debug/workers": {"GET"}, "/x": {"GET"}}.items():
            for method in methods:
                status = (await client.request(method, path.replace("{", "").replace("}", ""))).status_code
                assert (status != 401) is (path in OPEN), path


async def test_both_ways_to_say_it(guarded: Gateway) -> None:
    assert (await ask(guarded, KEY)).status_code == 200
    assert (await ask(guarded, None, **{"x-api-key": KEY})).status_code == 200
    assert (await ask(guarded, None, Authorization=f"bearer  {KEY}")).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": f"Bearer {hashed(KEY)}"},
        {"x-api-key": ""},
        {"x-api-key": KEY[:-1]},
    ],
)
async def test_without_a_valid_key(guarded: Gateway, headers: dict[str, str]) -> None:
    before = len(guarded.backend.generations)
    answer = await ask(guarded, None, **headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert answer.headers["X-Request-Id"]
    assert len(guarded.backend.generations) == before


async def test_each_api_in_its_own_words(guarded: Gateway) -> None:
    answer = await ask(guarded, None, "/v1/messages")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert answer.json()["type"] == "error"


async def test_a_body_is_not_read_before_the_key(guarded: Gateway) -> None:
    async with guarded.client() as client:
        answer = await client.post("/v1/completions", content=b"x" * (20 << 20))
    assert answer.status_code == 401


async def test_requests_above_the_rate(guarded: Gateway) -> None:
    answers = [await ask(guarded, SLOW_KEY) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 25 <= int(answers[2].headers["Retry-After"]) <= 31
    assert (await ask(guarded, KEY)).status_code == 200


async def test_tokens_above_the_rate(guarded: Gateway) -> None:
    body = PLAIN | {"prompt": [5] * 55}
    async with guarded.client() as client:
        headers = {"x-api-key": LOW_KEY}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        answer = await client.post("/v1/completions", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    # 55 of the first prompt and its answer are used up, and refill at one a second.
    generated = guarded.metric("moebius_gateway_client_tokens_total", client="low", kind="generated")
    assert generated > 5
    assert int(answer.headers["Retry-After"]) == pytest.approx(50 + generated, abs=2)


async def test_a_header_makes_less_urgent_but_not_more(guarded: Gateway) -> None:
    assert (await ask(guarded, KEY)).status_code == 200
    assert guarded.backend.generations[-1].priority == 0
    assert guarded.backend.generations[-1].client == "team-a"
    assert (await ask(guarded, KEY, **{"X-Priority": "low"})).status_code == 200
    assert guarded.backend.generations[-1].priority == 1
    for priority in ("high", "urgent"):
        answer = await ask(guarded, KEY, **{"X-Priority": priority})
        assert answer.status_code == 400
        assert "normal, low" in answer.json()["error"]["message"]


async def test_what_is_counted(guarded: Gateway) -> None:
    assert (await ask(guarded, KEY)).status_code == 200
    assert guarded.metric("moebius_gateway_client_requests_total", client="team-a") > 0
    assert guarded.metric("moebius_gateway_client_tokens_total", client="team-a", kind="prompt") > 0
    assert guarded.metric("moebius_gateway_api_keys") == 4


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_is_there_for_the_key_that_asked_for_it_alone(
    guarded: Gateway, background: bool
) -> None:
    never = asyncio.Event()
    guarded.backend.script = (lambda _: [never]) if background else None
    async with guarded.client() as client:

        async def ask_of(key: str, method: str, path: str, **body: object) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            return await client.request(method, f"/v1/responses{path}", headers=headers, json=body)

        asked = {"model": MODEL.id, "input": "Hi"}
        id_ = (await ask_of(KEY, "POST", "", **asked, background=background)).raise_for_status().json()["id"]
        ways = [("GET", f"/{id_}"), ("GET", f"/{id_}/input_items")]
        ways += [("POST", f"/{id_}/cancel")] if background else []
        ways += [("DELETE", f"/{id_}")]
        for method, path in ways:
            refused = await ask_of(OTHER_KEY, method, path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "response_not_found")
        for path in ("", "/input_tokens"):
            refused = await ask_of(OTHER_KEY, "POST", path, **asked, previous_response_id=id_)
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
        for method, path in ways:
            assert (await ask_of(KEY, method, path)).status_code == 200
        assert (await ask_of(KEY, "GET", f"/{id_}")).status_code == 404
    guarded.backend.reset()
