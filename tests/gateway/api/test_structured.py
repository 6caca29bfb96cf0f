"""Structured output: every way to ask for it becomes the grammar; what cannot be enforced says where."""

import time
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel

from tests.gateway.api.chatty import ASK, MODEL, SCHEMA, last, says, tools
from tests.gateway.http_server import Gateway, tokenizer_files
from tests.tiny import EOS_TOKEN_ID

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT: dict[str, Any] = {"model": MODEL.id, "messages": ASK}
CITY = '{"city": "Ulm"}'
UNIQUE = {"type": "object", "properties": {"a": {"items": {"uniqueItems": True}}}}
UNTYPED = {"type": "object", "properties": {"a": {"type": "x"}}}


def lets_through(grammar: str | None, answer: str) -> bool:
    tokenizer = LLTokenizer(tokenizer_files()["tokenizer.json"].decode(), eos_token=EOS_TOKEN_ID)
    assert grammar is not None
    matcher, ids = LLMatcher(tokenizer, grammar), tokenizer.tokenize_str(answer)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def named(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"response_format": named(SCHEMA, strict=True)}, CITY, '{"days": 1}'),
        ({"response_format": named(SCHEMA)}, '{\n  "city": "Ulm",\n  "days": 3\n}', '{"city": 1}'),
        ({"response_format": {"type": "json_object"}}, '{"a": [1, null]}', "[1]"),
        ({"guided_json": SCHEMA}, CITY, "{}"),
        ({"guided_json": '{"type": "integer"}'}, "17", '"17"'),
        ({"guided_regex": r"\d{3}/[a-c]"}, "123/b", "12/b"),
        ({"guided_choice": ["yes", "no", "no/\n"]}, "no/\n", "maybe"),
        ({"guided_grammar": 'start: "a" b\nb: /[0-9]+/'}, "a12", "a"),
        ({"guided_grammar": 'root ::= "a" b\nb ::= [0-9]+'}, "a12", "b"),
        ({"structured_outputs": {"json": SCHEMA}}, CITY, "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"structured_outputs": {"regex": "a|b"}}, "b", "ab"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "a", "c"),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, "x", "y"),
    ],
)
async def test_every_way_to_ask(chatty: Gateway, asked: dict[str, Any], good: str, bad: str) -> None:
    async with chatty.client() as http:
        assert (await http.post("/v1/chat/completions", json=CHAT | asked)).status_code == 200
        grammar = last(chatty).grammar
        for thought in ("", "<think>\nHm\n</think>\n\n"):
            assert lets_through(grammar, thought + good)
            assert not lets_through(grammar, thought + bad)
        plain = {"model": MODEL.id, "prompt": "x"}
        assert (await http.post("/v1/completions", json=plain | asked)).status_code == 200
        assert lets_through(last(chatty).grammar, good)
        assert not lets_through(last(chatty).grammar, bad)
        assert not lets_through(last(chatty).grammar, f"<think></think>{good}"), "plain text has no format"


async def test_reasoning_that_is_turned_off_is_not_let_through(chatty: Gateway) -> None:
    asked = {"response_format": {"type": "json_object"}}
    async with chatty.client() as http:
        for off, thought in ((False, True), (True, False)):
            switch = {"chat_template_kwargs": {"enable_thinking": not off}}
            await http.post("/v1/chat/completions", json=CHAT | asked | switch)
            assert lets_through(last(chatty).grammar, "{}")
            assert lets_through(last(chatty).grammar, "<think>\nHm\n</think>\n\n{}") is thought


async def test_without_demands_there_is_no_grammar(chatty: Gateway) -> None:
    for more in ({}, {"tools": tools()}, {"response_format": {"type": "text"}}):
        await chatty.openai().chat.completions.create(**CHAT | more)
        assert last(chatty).grammar is None


class City(BaseModel):
    city: str


async def test_clients_parse_what_comes(chatty: Gateway) -> None:
    says(chatty.backend, f"<think>Hm</think>{CITY}")
    chat = await chatty.openai().chat.completions.parse(**CHAT, response_format=City)
    assert chat.choices[0].message.parsed == City(city="Ulm")
    response = await chatty.openai().responses.parse(model=MODEL.id, input="Hi", text_format=City)
    assert response.output_parsed == City(city="Ulm")
    assert lets_through(last(chatty).grammar, CITY)


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_that_must_be(chatty: Gateway, choice: Any) -> None:
    more = [*tools(), *tools(name="other")]
    await chatty.openai().chat.completions.create(**CHAT, tools=more, tool_choice=choice)
    grammar = last(chatty).grammar
    assert lets_through(grammar, CALL)
    assert lets_through(grammar, CALL + "\n" + CALL) is (choice == "required")
    assert not lets_through(grammar, "I look." + CALL)
    assert not lets_through(grammar, CALL.replace("city", "town"))
    assert lets_through(grammar, CALL.replace("weather", "other")) is (choice == "required")
    await chatty.openai().chat.completions.create(
        **CHAT, tools=more, tool_choice=choice, parallel_tool_calls=False
    )
    assert not lets_through(last(chatty).grammar, CALL + CALL)


async def test_a_schema_forbids_no_calls(chatty: Gateway) -> None:
    asked = CHAT | {"response_format": named({"type": "integer"})}
    await chatty.openai().chat.completions.create(**asked, tools=tools())
    assert lets_through(last(chatty).grammar, "17")
    assert lets_through(last(chatty).grammar, CALL)
    assert not lets_through(last(chatty).grammar, "I look.")
    await chatty.openai().chat.completions.create(**asked, tools=tools(), tool_choice="none")
    assert not lets_through(last(chatty).grammar, CALL)


async def test_a_strict_tool_among_others(chatty: Gateway) -> None:
    """Others may be called too, with arguments of the types that can be enforced."""
    parameters = {
        "type": "object",
        "properties": {"odd": {"not": {"type": "null"}}, "size": {"type": "integer"}},
        "required": ["size"],
    }
    more = [*tools(strict=True), *tools(name="other", parameters=parameters)]
    for choice in ("auto", "required"):
        await chatty.openai().chat.completions.create(**CHAT, tools=more, tool_choice=choice)
        other = '<tool_call>{"name": "other", "arguments": {"odd": "x", "size": 3}}</tool_call>'
        assert lets_through(last(chatty).grammar, other)
        assert lets_through(last(chatty).grammar, CALL)
        assert not lets_through(last(chatty).grammar, other.replace("3", '"3"'))
        assert not lets_through(last(chatty).grammar, other.replace("other", "another"))


async def test_strict_tools(chatty: Gateway) -> None:
    await chatty.openai().chat.completions.create(**CHAT, tools=tools(strict=True))
    grammar = last(chatty).grammar
    assert lets_through(grammar, "I look.")
    assert lets_through(grammar, f"I look.\n{CALL}")
    assert not lets_through(grammar, f"I look.\n{CALL.replace('city', 'town')}")


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (
            {
                "response_format": named(
                    {"type": "object", "properties": {"a": {"items": {"uniqueItems": True}}}}
                )
            },
            "response_format.json_schema.schema.properties.a.items",
        ),
        ({"response_format": named({"anyOf": [{"type": "integer"}, {"type": "int"}]})}, "schema.anyOf[1]"),
        (
            {"response_format": named({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}})},
            "response_format.json_schema.schema.$defs.a",
        ),
        ({"response_format": named({"$ref": "#/$defs/none"})}, "response_format.json_schema.schema"),
        ({"extra_body": {"guided_json": {"type": "string", "pattern": "("}}}, "guided_json"),
        ({"extra_body": {"guided_regex": "(?=a)b"}}, "guided_regex"),
        ({"extra_body": {"guided_grammar": "start: x"}}, "guided_grammar"),
        ({"extra_body": {"guided_grammar": "a b c"}}, "guided_grammar"),
        ({"extra_body": {"guided_choice": ["x" * 300_000]}}, "guided_choice"),
        (
            {
                "tools": tools(parameters=UNTYPED, strict=True),
                "tool_choice": "required",
            },
            "tools ('weather').properties.a",
        ),
    ],
)
async def test_what_cannot_be_enforced_is_refused_where_it_stands(
    chatty: Gateway, asked: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chatty.openai().chat.completions.create(**CHAT | asked)
    assert refused.value.param.endswith(param)
    assert not chatty.backend.generations


@pytest.mark.timed
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("regex", ["(a{1000}){1000}", "x(a{1000}){1000}", "(a?){1000}a{1000}"])
async def test_an_expression_that_takes_seconds_to_follow_is_refused_at_once(
    chatty: Gateway, regex: str
) -> None:
    begun = time.process_time()
    with pytest.raises(openai.BadRequestError, match="too much to follow") as refused:
        await chatty.openai().chat.completions.create(**CHAT, extra_body={"guided_regex": regex})
    assert refused.value.param == "guided_regex"
    assert time.process_time() - begun < 1
    assert not chatty.backend.generations


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_regex": r"[^\s\S]"},
        {"guided_regex": r"ab[^\s\S]"},
        {"guided_json": {"$ref": "#"}},
        {"guided_grammar": 'start: start "a"'},
    ],
)
async def test_what_no_answer_can_satisfy_is_refused_as_that(chatty: Gateway, asked: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chatty.openai().chat.completions.create(**CHAT, extra_body=asked)
    assert refused.value.param in asked
    assert "too much" not in refused.value.message
    assert "no answer satisfies it" in refused.value.message


@pytest.mark.parametrize(
    ("choice", "several"),
    [
        ("required", True),
        ({"type": "function", "function": {"name": "weather"}}, False),
    ],
)
async def test_who_names_a_function_gets_one_call(chatty: Gateway, choice: Any, several: bool) -> None:
    says(chatty.backend, CALL + CALL)
    async with chatty.client() as http:
        asked = CHAT | {"tools": tools(), "tool_choice": choice}
        answer = (await http.post("/v1/chat/completions", json=asked)).json()
    assert len(answer["choices"][0]["message"]["tool_calls"]) == (2 if several else 1)
    assert lets_through(last(chatty).grammar, CALL)
    assert lets_through(last(chatty).grammar, CALL + CALL) is several


async def test_any_number_of_choices(chatty: Gateway) -> None:
    """The library's parser takes two thousand; and any character."""
    words = [f"word {i}" for i in range(5000)] + ["\x7f", "\u2028", '"\\/\n']
    async with chatty.client() as http:
        response = await http.post(
            "/v1/completions", json={"model": MODEL.id, "prompt": "x", "guided_choice": words}
        )
    assert response.status_code == 200, response.text
    for word in (words[0], words[4999], *words[5000:]):
        assert lets_through(last(chatty).grammar, word)
    assert not lets_through(last(chatty).grammar, "word 5000")
