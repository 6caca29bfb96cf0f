"""Endpoints of many kinds: which parameters are used with them, and what is said when they refuse."""

import asyncio

import httpx
import pytest

from moebius_cli.bench.connections import Connections
from moebius_cli.bench.endpoint import Dialect, Endpoint, Lengths, examine, fitted
from moebius_cli.errors import CliError
from tests.cli.bench.scripted import scripted
from tests.ports import free_port


def examined(url: str, model: str | None = None, api_key: str | None = None) -> Endpoint:
    async def run() -> Endpoint:
        async with Connections(httpx.URL(url + "/v1"), api_key) as connections:
            return await examine(connections, model, 30.0)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("unknown", "expected"),
    [
        ((), Dialect("ignore_eos", True, "max_tokens")),
        (("ignore_eos",), Dialect("min_tokens", True, "max_tokens")),
        (("ignore_eos", "min_tokens"), Dialect("none", True, "max_tokens")),
        (("stream_options",), Dialect("ignore_eos", False, "max_tokens")),
        (("max_tokens", "ignore_eos", "min_tokens"), Dialect("none", True, "max_completion_tokens")),
    ],
)
def test_the_fullest_dialect_that_is_taken(unknown: tuple[str, ...], expected: Dialect) -> None:
    with scripted(unknown=frozenset(unknown)) as endpoint:
        found = examined(endpoint.url)
    assert found.dialect == expected
    sent = endpoint.bodies[-1]
    assert not sent.keys() & set(unknown)
    assert sent[expected.limit] == 1


def test_lengths_are_those_of_the_endpoints_tokenizer() -> None:
    with scripted(template_tokens=17, word_tokens=3) as endpoint:
        lengths = examined(endpoint.url).lengths
    assert lengths == Lengths(3.0, 17)
    # 17 + 3 * 37 = 128
    assert lengths.words(128) == 37
    assert lengths.words(5) == 1


def test_an_endpoint_that_does_not_tell_lengths() -> None:
    with scripted(usage=False) as endpoint:
        assert examined(endpoint.url).lengths is None
    assert fitted(None, None) is None
    # As of a cap on what is counted.
    assert fitted(64, 64) is None


def test_one_token_without_text_is_no_obstacle() -> None:
    with scripted(ends_by_itself=0) as endpoint:
        assert examined(endpoint.url).lengths is not None


def test_the_model_is_the_first_or_the_one_that_is_named() -> None:
    with scripted(models=("a", "b")) as endpoint:
        assert examined(endpoint.url).model == "a"
        assert examined(endpoint.url, "b").model == "b"
    assert {body["model"] for body in endpoint.bodies} == {"a", "b"}


def test_an_endpoint_without_a_list_of_models() -> None:
    with scripted(models=None) as endpoint:
        with pytest.raises(
            CliError, match=r"404: not here\. If it has no list of models, name one with --model"
        ):
            examined(endpoint.url)
        assert examined(endpoint.url, "a").model == "a"
    with scripted(models=()) as endpoint, pytest.raises(CliError, match="lists no model"):
        examined(endpoint.url)


def test_the_key_is_sent() -> None:
    with scripted(api_key="s3cret") as endpoint:
        assert examined(endpoint.url, api_key="s3cret").model == "clerk"
        for model in (None, "clerk"):
            with pytest.raises(CliError, match="no such key") as error:
                examined(endpoint.url, model, api_key="wr0ng")
            assert "wr0ng" not in str(error.value)


def test_an_endpoint_that_refuses_is_told_in_its_words() -> None:
    with scripted(refusal=(400, '{"error": {"message": "context of 8 tokens"}}')) as endpoint:
        with pytest.raises(CliError, match="HTTP 400: context of 8 tokens"):
            examined(endpoint.url)
        assert len(endpoint.bodies) > 1
    with scripted(refusal=(503, "no worker")) as endpoint:
        with pytest.raises(CliError, match="HTTP 503: no worker"):
            examined(endpoint.url)
        assert len(endpoint.bodies) == 1


@pytest.mark.parametrize("model", [None, "clerk"])
def test_nobody_answers(model: str | None) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(CliError, match=url):
        examined(url, model)
