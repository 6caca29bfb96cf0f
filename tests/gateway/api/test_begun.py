"""Answers that the client has begun: Anthropic's prefill, `continue_final_message` of chat completions."""

from typing import Any

import pytest

from moebius_gateway.text.conversation import Conversation, Message
from moebius_gateway.text.errors import PromptError
from moebius_gateway.text.template import ChatTemplate
from tests.gateway.api.chatty import CALL, MODEL, THOUGHT, prompt, says, tools
from tests.gateway.http_server import Gateway

pytestmark = pytest.mark.asyncio(loop_scope="session")
ASKED = {"role": "user", "content": "Hi"}
MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"


def begun(url: str, text: str, **more: Any) -> dict[str, Any]:
    way = {"max_tokens": 99} if url == MESSAGES else {"continue_final_message": True}
    return {"model": MODEL.id, "messages": [ASKED, {"role": "assistant", "content": text}]} | way | more


async def answer(gateway: Gateway, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the message or the choice says, in the words of chat completions."""
    async with gateway.client() as client:
        got: dict[str, Any] = (await client.post(url, json=body)).raise_for_status().json()
    if url == MESSAGES:
        return {"content": "".join(block["text"] for block in got["content"])}
    message: dict[str, Any] = got["choices"][0]["message"]
    return message


@pytest.mark.parametrize("url", [MESSAGES, CHAT])
@pytest.mark.parametrize("text", ["The sky is", 'In JSON: {"', "ends in white space \n", "🙂", ""])
async def test_the_prompt_ends_where_the_answer_does(chatty: Gateway, url: str, text: str) -> None:
    says(chatty.backend, " blue.")
    assert (await answer(chatty, url, begun(url, text)))["content"] == " blue."
    assert prompt(chatty) == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{text}"


async def test_what_looks_like_a_beginning_is_none_in_the_middle(chatty: Gateway) -> None:
    """`<think>` opens reasoning where an answer begins, and nowhere else."""
    says(chatty.backend, "<think> opens it.")
    message = await answer(chatty, CHAT, begun(CHAT, "The tag "))
    assert message["content"] == "<think> opens it."
    assert "reasoning_content" not in message


async def test_calls_are_read_behind_it(chatty: Gateway) -> None:
    says(chatty.backend, " look.\n" + CALL)
    message = await answer(chatty, CHAT, begun(CHAT, "I", tools=tools()))
    assert message["content"] == " look."
    assert message["tool_calls"][0]["function"]["name"] == "weather"


async def test_reasoning_that_is_begun_goes_on(chatty: Gateway) -> None:
    says(chatty.backend, "weather?\n</think>\n\nI look.")
    message = await answer(chatty, CHAT, begun(CHAT, "<think>\nThe "))
    assert (message["reasoning_content"], message["content"]) == ("weather?", "I look.")
    says(chatty.backend, "look.")
    assert (await answer(chatty, CHAT, begun(CHAT, THOUGHT + "I ")))["content"] == "look."


async def test_tokens_are_counted_of_the_same_prompt(chatty: Gateway) -> None:
    body = begun(CHAT, "The sky is")
    await answer(chatty, CHAT, body)
    async with chatty.client() as client:
        told = (await client.post("/tokenize", json=body)).raise_for_status().json()
        del body["continue_final_message"]
        count = (await client.post(f"{MESSAGES}/count_tokens", json=body)).raise_for_status().json()
    assert tuple(told["tokens"]) == chatty.backend.generations[-1].prompt_ids
    assert count["input_tokens"] == told["count"]


CALLED = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
CALLS = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALLED]}]
USE = [ASKED, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "w", "input": {}}]}]
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "nothing to go on with": (CHAT, begun(CHAT, "", messages=[ASKED]), "continue_final_message"),
    "a call": (CHAT, begun(CHAT, "", messages=CALLS), "continue_final_message"),
    "a call of Anthropic's": (MESSAGES, begun(MESSAGES, "", messages=USE), "messages"),
    "a new answer as well": (CHAT, begun(CHAT, "x", add_generation_prompt=True), "add_generation_prompt"),
    "no answer at all": (
        CHAT,
        begun(CHAT, "x", add_generation_prompt=False, continue_final_message=False),
        "add_generation_prompt",
    ),
    "a format": (CHAT, begun(CHAT, "{", response_format={"type": "json_object"}), "messages"),
    "a call that must come": (CHAT, begun(CHAT, "x", tools=tools(), tool_choice="required"), "messages"),
    "a budget": (
        MESSAGES,
        begun(MESSAGES, "x", max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024}),
        "messages",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_cannot_be_is_refused_by_name(chatty: Gateway, case: str) -> None:
    url, body, param = REFUSED[case]
    async with chatty.client() as client:
        refusal = await client.post(url, json=body)
    assert refusal.status_code == 400
    error = refusal.json()["error"]
    assert error["param"] == param if url == CHAT else error["type"] == "invalid_request_error"
    assert not chatty.backend.generations


async def test_templates_that_trim_or_leave_out() -> None:
    def rendered(source: str, said: str) -> str:
        messages = (Message("user", "Hi"), Message("assistant", said))
        return ChatTemplate(source, {}).render(Conversation(messages, continued=True))

    source = (
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
        "{% if add_generation_prompt %}<new>{% endif %}"
    )
    assert rendered(source, "ends in white space ") == "[Hi][ends in white space "
    with pytest.raises(PromptError, match="no place for an answer that is begun"):
        rendered("{{ messages[0].content }}", "x")
