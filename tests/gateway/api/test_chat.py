"""Reasoning and tool calls in chat completions, through the unmodified `openai` client."""

from typing import Any

import openai
import orjson
import pytest

from moebius_gateway.types import FinishReason
from tests.gateway.api.chatty import ASK, CALL, MODEL, SPOKEN, THOUGHT, last, prompt, says, tools
from tests.gateway.http_server import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT: dict[str, Any] = {"model": MODEL.id, "messages": ASK}


async def test_reasoning_is_apart_and_counted(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN)
    answer = await chatty.openai().chat.completions.create(**CHAT)
    message = answer.choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("I look.", "The weather?")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(SPOKEN) + 1
    # From the first character that is known to be thought to the marker's beginning, and what is held there.
    assert len("The weather?") <= answer.usage.completion_tokens_details.reasoning_tokens <= len(THOUGHT)


async def test_a_call(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN + CALL)
    answer = await chatty.openai().chat.completions.create(**CHAT, tools=tools())
    [choice] = answer.choices
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == (
        "function",
        "weather",
        '{"city": "Köln"}',
    )
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert '"name": "weather"' in prompt(chatty)


@pytest.mark.parametrize("text", [CALL + "\n" + CALL, SPOKEN + CALL, THOUGHT + CALL])
async def test_streamed_calls_are_those_of_the_whole(chatty: Gateway, text: str) -> None:
    says(chatty.backend, text)
    plain = (await chatty.openai().chat.completions.create(**CHAT, tools=tools())).choices[0]
    async with chatty.openai().chat.completions.stream(**CHAT, tools=tools()) as stream:
        async for _ in stream:
            pass
        streamed = (await stream.get_final_completion()).choices[0]
    assert streamed.finish_reason == plain.finish_reason == "tool_calls"
    assert (streamed.message.content or None) == plain.message.content
    calls = [(call.function.name, call.function.arguments) for call in plain.message.tool_calls]
    assert [(call.function.name, call.function.arguments) for call in streamed.message.tool_calls] == calls
    assert len({call.id for call in streamed.message.tool_calls}) == len(calls) == text.count("<tool_call>")


async def test_only_text_without_tools(chatty: Gateway) -> None:
    says(chatty.backend, CALL)
    answer = await chatty.openai().chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].message.tool_calls is None


async def test_none_hides_the_tools(chatty: Gateway) -> None:
    says(chatty.backend, CALL)
    answer = await chatty.openai().chat.completions.create(**CHAT, tools=tools(), tool_choice="none")
    assert "weather" not in prompt(chatty)
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].finish_reason == "stop"


async def test_a_call_that_is_cut_off_is_no_call(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN + CALL[:50], FinishReason.LENGTH)
    answer = await chatty.openai().chat.completions.create(**CHAT, tools=tools())
    [choice] = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        "I look.",
        None,
        "length",
    )
    stream = await chatty.openai().chat.completions.create(**CHAT, tools=tools(), stream=True)
    assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"


async def test_at_most_one_call(chatty: Gateway) -> None:
    says(chatty.backend, CALL + CALL + "more")
    answer = await chatty.openai().chat.completions.create(**CHAT, tools=tools(), parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].message.content is None
    assert chatty.backend.running == 0, "the generation was not ended at its worker"


async def test_stop_strings_are_looked_for_in_what_is_said(chatty: Gateway) -> None:
    says(chatty.backend, "<think>the city</think>A city is" + CALL.replace("Köln", "the city"))
    answer = await chatty.openai().chat.completions.create(**CHAT, tools=tools(), stop=["the city"])
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("A city is", "tool_calls")
    stopped = await chatty.openai().chat.completions.create(**CHAT, tools=tools(), stop=["ity i"])
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("A c", "stop")
    assert stopped.choices[0].message.model_extra["reasoning_content"] == "the city"


async def test_choices_have_calls_of_their_own(chatty: Gateway) -> None:
    chatty.backend.script = lambda generation: chatty.backend.say(
        CALL.replace("Köln", str(generation.sampling.seed % 100))
    )
    stream = await chatty.openai().chat.completions.create(**CHAT, tools=tools(), n=3, seed=1, stream=True)
    arguments, ids, finished = ["", "", ""], set(), {}
    async for chunk in stream:
        [choice] = chunk.choices
        for call in choice.delta.tool_calls or []:
            assert call.index == 0
            arguments[choice.index] += call.function.arguments
            ids |= {call.id} - {None}
        if choice.finish_reason:
            finished[choice.index] = choice.finish_reason
    cities = [str(generation.sampling.seed % 100) for generation in chatty.backend.generations]
    assert [orjson.loads(text)["city"] for text in arguments] == cities
    assert len(ids) == 3
    assert set(finished.values()) == {"tool_calls"}


async def test_five_turns_with_tools(chatty: Gateway) -> None:
    """What was answered can be sent back as it came, and the template sees it as it was."""
    messages: list[Any] = [*ASK]
    for turn in range(5):
        says(chatty.backend, THOUGHT + CALL.replace("Köln", f"city {turn}"))
        answer = await chatty.openai().chat.completions.create(
            model=MODEL.id, messages=messages, tools=tools()
        )
        message = answer.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"sun {turn}"}
        messages += [message.model_dump(exclude_none=True), result]
    said = prompt(chatty)
    assert said.count("<think>The weather?</think>") == 4
    for turn in range(4):
        assert f'<tool_call>{{"name": "weather", "arguments": {{"city": "city {turn}"}}}}</tool_call>' in said
        assert f"<|im_start|>tool\nsun {turn}<|im_end|>" in said


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "high"}, True),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, False),
    ],
)
async def test_reasoning_is_turned_off_with_tools_too(
    chatty: Gateway, asked: dict[str, Any], thinks: bool
) -> None:
    says(chatty.backend, "Hi.")
    answer = await chatty.openai().chat.completions.create(**CHAT, tools=tools(), **asked)
    assert prompt(chatty).endswith("<think></think>") is not thinks
    assert answer.choices[0].message.content == "Hi."


async def test_logprobs_of_the_whole_answer(chatty: Gateway) -> None:
    says(chatty.backend, SPOKEN + CALL)
    answer = await chatty.openai().chat.completions.create(**CHAT, tools=tools(), logprobs=True)
    text = b"".join(bytes(token.bytes) for token in answer.choices[0].logprobs.content).decode()
    assert text == SPOKEN + CALL
    stream = await chatty.openai().chat.completions.create(**CHAT, tools=tools(), logprobs=True, stream=True)
    streamed = [
        token
        async for chunk in stream
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content
    ]
    assert b"".join(bytes(token.bytes) for token in streamed).decode() == text


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [*tools(), *tools()]}, "tools"),
        ({"tools": tools(name="no name")}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": tools(), "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": tools(), "tool_choice": "sometimes"}, "tool_choice"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs.messages"),
        ({"extra_body": {"chat_template_kwargs": {"speed": 1}}}, "chat_template_kwargs.speed"),
        ({"extra_body": {"guided_json": {}, "guided_regex": "a"}}, "guided_regex"),
    ],
)
async def test_refused_by_name(chatty: Gateway, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chatty.openai().chat.completions.create(**CHAT | change)
    assert refused.value.param == param
    assert not chatty.backend.generations


async def test_a_model_without_a_place_for_tools_or_reasoning_says_so(gateway: Gateway) -> None:
    chat = {"model": "org/tiny", "messages": ASK}
    for change, param in [
        ({"tools": tools()}, "tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
            "chat_template_kwargs.enable_thinking",
        ),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            await gateway.openai().chat.completions.create(**chat, **change)
        assert refused.value.param == param


async def test_echo_is_the_prompt(chatty: Gateway) -> None:
    says(chatty.backend, " there")
    plain = {"model": MODEL.id, "prompt": ["Hi", "Ho"], "echo": True}
    answer = await chatty.openai().completions.create(**plain)
    assert [choice.text for choice in answer.choices] == ["Hi there", "Ho there"]
    texts = ["", ""]
    async for chunk in await chatty.openai().completions.create(**plain, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["Hi there", "Ho there"]
    assert last(chatty).prompt_ids != ()
