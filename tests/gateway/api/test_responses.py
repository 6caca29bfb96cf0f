"""OpenAI's responses, through the unmodified `openai` client."""

import asyncio
import base64
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from moebius_gateway.api.errors import ApiError
from moebius_gateway.api.responses.store import ResponseStore, Stored
from moebius_gateway.types import FinishReason, GenerationError, Reason
from tests.gateway.api.chatty import CALL, MODEL, SCHEMA, SPOKEN, THOUGHT, last, prompt, says
from tests.gateway.http_server import Gateway
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASKED: dict[str, Any] = {"model": MODEL.id, "input": "Hi"}
TOOLS = [{"type": "function", "name": "weather", "parameters": SCHEMA}]


async def test_items(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN + CALL)
    response = await chatty.openai().responses.create(**ASKED, tools=TOOLS)
    reasoning, message, call = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "The weather?")
    assert (message.type, response.output_text) == ("message", "I look.")
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Köln"}')
    assert (response.status, response.error) == ("completed", None)
    assert response.usage.output_tokens == len((SPOKEN + CALL).encode()) + 1
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    assert response.usage.input_tokens == len(last(chatty).prompt_ids)


PIECE = ("content_part.added", "delta", "done", "content_part.done")


async def test_the_order_of_events(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN + CALL)
    events = [
        event async for event in await chatty.openai().responses.create(**ASKED, tools=TOOLS, stream=True)
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    distinct = [kind for i, kind in enumerate(kinds) if not i or kinds[i - 1] != kind]
    text = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done"]
    expected = ["created", "in_progress"]
    for what in ("reasoning_text", "output_text"):
        expected += [kind.format(what) for kind in [*text, "output_item.done"]]
    call = "function_call_arguments"
    expected += ["output_item.added", f"{call}.delta", f"{call}.done", "output_item.done", "completed"]
    assert distinct == expected
    # All that belongs to an item names it.
    for event in events[2:-1]:
        item = events[-1].response.output[event.output_index]
        assert getattr(event, "item_id", None) in (None, item.id)


@pytest.mark.parametrize("text", [SPOKEN, SPOKEN + CALL, CALL + CALL, "Hi.", THOUGHT + CALL])
async def test_a_stream_gives_the_whole(chatty: Gateway, text: str) -> None:
    says(chatty.backend, text)
    whole = await chatty.openai().responses.create(**ASKED, tools=TOOLS)
    async with chatty.openai().responses.stream(**ASKED, tools=TOOLS) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_response()

    def told(response: Any) -> list[dict[str, Any]]:
        parsed = {"id", "call_id", "parsed_arguments"}
        return [item.model_dump(exclude=parsed) | {"content": None} for item in response.output]

    assert told(streamed) == told(whole)
    assert streamed.output_text == whole.output_text
    assert streamed.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_cut_off_is_incomplete(chatty: Gateway, stream: bool) -> None:
    says(chatty.backend, "I look." + CALL[:50], FinishReason.LENGTH)
    asked = ASKED | {"tools": TOOLS, "max_output_tokens": 50}
    if stream:
        events = [event async for event in await chatty.openai().responses.create(**asked, stream=True)]
        response = events[-1].response
        assert events[-1].type == "response.incomplete"
        assert "response.function_call_arguments.done" not in [event.type for event in events]
    else:
        response = await chatty.openai().responses.create(**asked)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [(item.type, item.status) for item in response.output] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
    ]


async def test_a_conversation_that_the_gateway_keeps(chatty: Gateway) -> None:
    client = chatty.openai()
    says(chatty.backend, SPOKEN + CALL)
    first = await client.responses.create(**ASKED, tools=TOOLS, instructions="Be short.")
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sun"}
    says(chatty.backend, "Sun.")
    second = await client.responses.create(
        model=MODEL.id, input=[output], previous_response_id=first.id, stream=True
    )
    events = [event async for event in second]
    third = await client.responses.create(
        model=MODEL.id, input="Thanks.", previous_response_id=events[-1].response.id
    )
    assert prompt(chatty) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>The weather?</think>I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\nSun.<|im_end|>\n"
        "<|im_start|>user\nThanks.<|im_end|>\n<|im_start|>assistant\n"
    ), "instructions are of one request only"
    assert (await client.responses.retrieve(third.id)) == third
    [item] = (await client.responses.input_items.list(first.id)).data
    assert (item.role, item.content) == ("user", "Hi")
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as gone:
        await client.responses.create(**ASKED, previous_response_id=first.id)
    assert gone.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("param", "value"), [("order", "newest"), ("limit", 0), ("limit", 101), ("after", "item_of_another")]
)
async def test_a_page_that_cannot_be_had_is_refused_by_name(chatty: Gateway, param: str, value: Any) -> None:
    responses = chatty.openai().responses
    first = await responses.create(**ASKED)
    with pytest.raises(openai.BadRequestError) as refused:
        await responses.input_items.list(first.id, **{param: value})
    assert refused.value.param == param


async def test_a_conversation_that_the_client_keeps(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN + CALL)
    first = await chatty.openai().responses.create(
        **ASKED, tools=TOOLS, store=False, include=["reasoning.encrypted_content"]
    )
    with pytest.raises(openai.NotFoundError):
        await chatty.openai().responses.retrieve(first.id)
    items = [item.model_dump(exclude_none=True) for item in first.output]
    # What clients keep of it is what they cannot read.
    assert base64.b64decode(items[0]["encrypted_content"]) == b"The weather?"
    items[0] |= {"content": []}
    await chatty.openai().responses.create(
        model=MODEL.id, input=[{"role": "user", "content": "Hi"}, *items, {"role": "user", "content": "And?"}]
    )
    assert "<think>The weather?</think>I look.<tool_call>" in prompt(chatty)
    items[0]["encrypted_content"] = "?"
    with pytest.raises(openai.BadRequestError, match="encrypted_content"):
        await chatty.openai().responses.create(model=MODEL.id, input=items)


async def test_in_the_background(chatty: Gateway) -> None:
    client, go = chatty.openai(), asyncio.Event()
    chatty.backend.script = lambda _: [go, *chatty.backend.say("Done.")]
    response = await client.responses.create(**ASKED, background=True)
    assert (response.status, response.output) == ("in_progress", [])
    with pytest.raises(openai.BadRequestError, match="not finished"):
        await client.responses.create(**ASKED, previous_response_id=response.id)
    go.set()

    response = await _ended(client, response.id)
    assert (response.status, response.output_text) == ("completed", "Done.")
    assert (await client.responses.cancel(response.id)).status == "completed"


async def test_cancelled_failed_and_deleted_in_the_background(chatty: Gateway) -> None:
    client = chatty.openai()
    chatty.backend.script = lambda _: [asyncio.Event()]
    response = await client.responses.create(**ASKED, background=True)
    await until(lambda: chatty.backend.running == 1)
    assert (await client.responses.cancel(response.id)).status == "cancelled"
    assert chatty.backend.running == 0
    deleted = await client.responses.create(**ASKED, background=True)
    await until(lambda: chatty.backend.running == 1)
    await client.responses.delete(deleted.id)
    await until(lambda: chatty.backend.running == 0)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(deleted.id)
    chatty.backend.script = lambda _: [GenerationError(Reason.GPU_FAULT, "it died", retryable=True)]
    failed = await client.responses.create(**ASKED, background=True)
    failed = await _ended(client, failed.id)
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", "gpu_fault", "it died")
    plain = await _plain(chatty)
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(plain.id)


async def _ended(client: openai.AsyncOpenAI, response_id: str) -> Response:
    async def asked() -> Response | None:
        response = await client.responses.retrieve(response_id)
        return None if response.status == "in_progress" else response

    return await until(asked)


async def _plain(gateway: Gateway) -> Any:
    says(gateway.backend, "Hi.")
    return await gateway.openai().responses.create(**ASKED)


async def test_an_error_in_a_stream(chatty: Gateway) -> None:
    failure = GenerationError(Reason.GPU_FAULT, "it died", retryable=True)
    chatty.backend.script = lambda _: [*chatty.backend.say("some")[:2], failure]
    events = [event async for event in await chatty.openai().responses.create(**ASKED, stream=True)]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert (events[-2].code, events[-2].message) == ("gpu_fault", "it died")
    assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "gpu_fault")
    chatty.backend.script = lambda _: [failure]
    with pytest.raises(openai.InternalServerError):
        await chatty.openai().responses.create(**ASKED, stream=True)


async def test_logprobs(chatty: Gateway) -> None:
    says(chatty.backend, "Hi.")
    asked = ASKED | {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    response = await chatty.openai().responses.create(**asked)
    logprobs = response.output[0].content[0].logprobs
    assert [(token.token, len(token.top_logprobs)) for token in logprobs] == [("H", 2), ("i", 2), (".", 2)]
    events = [event async for event in await chatty.openai().responses.create(**asked, stream=True)]
    assert events[-1].response.output[0].content[0].logprobs == logprobs


async def test_what_a_request_would_cost(chatty: Gateway) -> None:
    count = await chatty.openai().responses.input_tokens.count(**ASKED, tools=TOOLS, instructions="Be short.")
    response = await chatty.openai().responses.create(**ASKED, tools=TOOLS, instructions="Be short.")
    assert count.input_tokens == response.usage.input_tokens


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].message.content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
    ],
)
async def test_refused_by_name(chatty: Gateway, change: dict[str, Any], param: str) -> None:
    async with chatty.client() as http:
        response = await http.post("/v1/responses", json=ASKED | change)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not chatty.backend.generations


def stored(number: int, text: str = "") -> Stored:
    return Stored("me", {"id": f"resp_{number}", "text": text}, [], [])


async def test_the_store_is_bounded() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10_000)
    for number in range(3):
        store.put(stored(number))
    store.get("resp_0", "me")  # used: it is not the oldest any more
    store.put(stored(3))
    with pytest.raises(ApiError):
        store.get("resp_1", "me")
    assert store.get("resp_0", "me")
    store.put(stored(4, "x" * 9_950))
    assert len(store) == 1
    big = store.get("resp_4", "me")
    store.replace(big, {"id": "resp_4"})
    store.put(stored(5))
    assert len(store) == 2, "what it no longer holds is still counted"


async def test_what_is_generated_stays_in_the_store() -> None:
    store, running = ResponseStore(max_responses=1), stored(0)
    running.task = asyncio.create_task(asyncio.sleep(10))
    store.put(running)
    store.put(stored(1))
    assert store.get("resp_0", "me")
    with pytest.raises(ApiError):
        store.get("resp_1", "me")
    running.task.cancel()


async def test_what_is_kept_is_its_owners_alone() -> None:
    store = ResponseStore()
    store.put(stored(0))
    for ask in (store.get, store.delete):
        with pytest.raises(ApiError) as refused:
            ask("resp_0", "another")
        assert refused.value.status == 404
    assert store.get("resp_0", "me")
