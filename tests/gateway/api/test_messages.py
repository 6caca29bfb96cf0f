"""Anthropic's messages, through the unmodified `anthropic` client."""

from typing import Any

import anthropic
import pytest

from moebius_gateway.types import FinishReason, GenerationError, Reason, Tokens
from tests.gateway.api.chatty import ASK, CALL, MODEL, SCHEMA, SPOKEN, THOUGHT, last, prompt, says
from tests.gateway.http_server import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASKED: dict[str, Any] = {"model": MODEL.id, "messages": ASK, "max_tokens": 2000}
TOOLS = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]


def client(gateway: Gateway) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=20)


async def test_blocks(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN + CALL)
    message = await client(chatty).messages.create(**ASKED, tools=TOOLS)
    thinking, text, use = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "The weather?")
    assert thinking.signature
    assert (text.type, text.text) == ("text", "I look.")
    assert (use.type, use.name, use.input) == ("tool_use", "weather", {"city": "Köln"})
    assert use.id.startswith("toolu_")
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    assert message.usage.output_tokens == len((SPOKEN + CALL).encode()) + 1


async def test_the_order_of_events(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN + CALL)
    stream = await client(chatty).messages.create(**ASKED, tools=TOOLS, stream=True)
    seen: list[tuple[str, Any]] = []
    async for event in stream:
        kind = event.type
        if kind == "content_block_start":
            seen.append((kind, event.content_block.type))
        elif kind == "content_block_delta":
            if seen[-1] != (kind, event.delta.type):
                seen.append((kind, event.delta.type))
        else:
            seen.append((kind, None))
    blocks = [("thinking", ["thinking_delta", "signature_delta"]), ("text", ["text_delta"])]
    blocks += [("tool_use", ["input_json_delta"])]
    expected = [("message_start", None)]
    for block, deltas in blocks:
        expected.append(("content_block_start", block))
        expected += [("content_block_delta", delta) for delta in deltas]
        expected.append(("content_block_stop", None))
    assert seen == [*expected, ("message_delta", None), ("message_stop", None)]


@pytest.mark.parametrize("text", [SPOKEN, SPOKEN + CALL, CALL + CALL, "Hi.", THOUGHT + CALL])
async def test_a_stream_gives_the_whole(chatty: Gateway, text: str) -> None:
    says(chatty.backend, text)
    whole = await client(chatty).messages.create(**ASKED, tools=TOOLS)
    async with client(chatty).messages.stream(**ASKED, tools=TOOLS) as stream:
        streamed = await stream.get_final_message()

    def told(message: Any) -> list[dict[str, Any]]:
        return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]

    assert told(streamed) == told(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


@pytest.mark.parametrize(
    ("text", "finish", "reason", "sequence"),
    [
        ("Hello", FinishReason.STOP, "end_turn", None),
        ("Hello", FinishReason.LENGTH, "max_tokens", None),
        ("one two three", FinishReason.STOP, "stop_sequence", "two"),
        (CALL[:40], FinishReason.LENGTH, "max_tokens", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_stopped(
    chatty: Gateway, text: str, finish: FinishReason, reason: str, sequence: str | None, stream: bool
) -> None:
    says(chatty.backend, text, finish)
    asked = ASKED | {"stop_sequences": ["two", "never"], "tools": TOOLS}
    if stream:
        async with client(chatty).messages.stream(**asked) as events:
            message = await events.get_final_message()
    else:
        message = await client(chatty).messages.create(**asked)
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


async def test_usage_counts_what_was_cached_apart(chatty: Gateway) -> None:
    said = chatty.backend.say("Hi")
    chatty.backend.script = lambda _: [Tokens(said[0].token_ids, cached_tokens=7), *said[1:]]
    count = await client(chatty).messages.count_tokens(model=MODEL.id, messages=ASK, tools=TOOLS)
    message = await client(chatty).messages.create(**ASKED, tools=TOOLS)
    assert message.usage.cache_read_input_tokens == 7
    assert message.usage.input_tokens + 7 == count.input_tokens == len(last(chatty).prompt_ids)
    async with client(chatty).messages.stream(**ASKED, tools=TOOLS) as stream:
        start = await anext(aiter(stream))
        assert start.message.usage.input_tokens + 7 == count.input_tokens


async def test_a_conversation_goes_to_the_template(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN + CALL)
    first = await client(chatty).messages.create(**ASKED, tools=TOOLS)
    result = {
        "type": "tool_result",
        "tool_use_id": first.content[-1].id,
        "content": [{"type": "text", "text": "sun"}],
    }
    history = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [result, {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}],
        },
    ]
    await client(chatty).messages.create(
        **ASKED | {"messages": history}, system=[{"type": "text", "text": "Be short."}], tools=TOOLS
    )
    assert prompt(chatty).partition("</tools>")[2].partition("\n")[2] == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n<think>The weather?</think>I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsun<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_thinking_can_be_turned_off_and_limited(chatty: Gateway) -> None:
    says(chatty.backend, "Hi.")
    await client(chatty).messages.create(**ASKED, thinking={"type": "disabled"})
    assert prompt(chatty).endswith("<think></think>")
    assert last(chatty).grammar is None
    await client(chatty).messages.create(**ASKED, thinking={"type": "enabled", "budget_tokens": 1024})
    assert not prompt(chatty).endswith("<think></think>")
    assert "max_tokens=1024" in last(chatty).grammar


async def test_parameters_reach_the_worker(chatty: Gateway) -> None:
    await client(chatty).messages.create(
        **ASKED | {"max_tokens": 9},
        metadata={"user_id": "me"},
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 3},
    )
    sampling = last(chatty).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 3)
    assert last(chatty).max_tokens == 9


@pytest.mark.parametrize(
    ("change", "about"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"speed": "fast"}, "speed"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "'f'"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "text-only"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "thinking"),
    ],
)
async def test_refused_by_name(chatty: Gateway, change: dict[str, Any], about: str) -> None:
    async with chatty.client() as http:
        response = await http.post("/v1/messages", json=ASKED | change)
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert about in body["error"]["message"]
    assert not chatty.backend.generations


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (Reason.OVERLOADED, anthropic.RateLimitError),
        (Reason.NOT_READY, anthropic.InternalServerError),
        (Reason.POISONED, anthropic.InternalServerError),
    ],
)
async def test_errors_before_the_first_event(
    chatty: Gateway, failure: Reason, error: type[anthropic.APIStatusError]
) -> None:
    chatty.backend.script = lambda _: [GenerationError(failure, "because", retryable=True)]
    for stream in (False, True):
        with pytest.raises(error, match="because"):
            await client(chatty).messages.create(**ASKED, stream=stream)


async def test_an_error_in_a_stream_is_its_last_event(chatty: Gateway) -> None:
    failure = GenerationError(Reason.GPU_FAULT, "it died", retryable=True)
    chatty.backend.script = lambda _: [*chatty.backend.say("some")[:2], failure]
    stream = await client(chatty).messages.create(**ASKED, stream=True)
    kinds = []

    async def read() -> None:
        async for event in stream:
            kinds.append(event.type)

    with pytest.raises(anthropic.APIStatusError, match="it died"):
        await read()
    assert kinds == ["message_start", "content_block_start", "content_block_delta", "content_block_delta"]
    assert chatty.metric("moebius_gateway_stream_errors_total", code="gpu_fault") >= 1


async def test_models(chatty: Gateway) -> None:
    [model] = (await client(chatty).models.list()).data
    assert (model.id, model.type, model.display_name) == (MODEL.id, "model", MODEL.id)
    assert model.created_at.timestamp() == MODEL.created
    assert (await client(chatty).models.retrieve(MODEL.id)).id == MODEL.id
    with pytest.raises(anthropic.NotFoundError):
        await client(chatty).messages.create(**ASKED | {"model": "none"})


async def test_an_attribution_that_changes_leaves_the_prompt_as_it_is(chatty: Gateway) -> None:
    """Claude Code's first block of the system prompt: in the prompt it would spoil every prefix cache."""
    prompts, counts = [], []
    for build in ("1a2", "9f0"):
        header = f"x-anthropic-billing-header: cc_version=2.1.37.{build}; cc_entrypoint=cli; cch={build}00;"
        system = [{"type": "text", "text": text} for text in (header, "You are an agent.")]
        await client(chatty).messages.create(**ASKED, system=system)
        prompts.append(last(chatty).prompt_ids)
        counted = await client(chatty).messages.count_tokens(model=MODEL.id, messages=ASK, system=system)
        counts.append(counted.input_tokens)
    await client(chatty).messages.create(**ASKED, system="You are an agent.")
    assert prompts == [last(chatty).prompt_ids] * 2
    assert counts == [len(prompts[0])] * 2
    await client(chatty).messages.create(**ASKED, system=[{"type": "text", "text": header}])
    alone = last(chatty).prompt_ids
    await client(chatty).messages.create(**ASKED)
    assert alone == last(chatty).prompt_ids
