"""The `anthropic` package of Python: messages, streams, thinking, tools, counting."""

from typing import Any

import anthropic
import pytest

from tests.clients.asking import LOOP_SAID, SAID, STEPS, TEXT, run_tool, user
from tests.clients.conftest import Api


def client(api: Api) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=api.url, api_key="none", max_retries=0, timeout=30)


def test_a_message_and_what_it_costs(scripted: Api) -> None:
    asked: dict[str, Any] = {"model": scripted.model, "messages": user(), "system": "Be brief."}
    answer = client(scripted).messages.create(max_tokens=200, **asked)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == SAID
    assert answer.stop_reason == "end_turn"
    counted = client(scripted).messages.count_tokens(**asked)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_thinking_as_a_stream(scripted: Api) -> None:
    with client(scripted).messages.stream(
        model=scripted.model, messages=user("think"), max_tokens=200
    ) as stream:
        said = "".join(stream.text_stream)
        thought, text = stream.get_final_message().content
    assert thought.type == "thinking"
    assert (thought.thinking, bool(thought.signature)) == ("Let me see.", True)
    assert text.type == "text"
    assert text.text == said == "You said: think"


def test_an_agents_loop_of_five_turns(scripted: Api) -> None:
    messages: list[Any] = user("go")
    asked: dict[str, Any] = {
        "model": scripted.model,
        "max_tokens": 500,
        "tools": [{"name": name, "input_schema": TEXT} for name in STEPS],
    }
    for name in STEPS:
        with client(scripted).messages.stream(messages=messages, **asked) as stream:
            answer = stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        [use] = [block for block in answer.content if block.type == "tool_use"]
        assert use.name == name
        messages.append({"role": "assistant", "content": answer.content})
        result = run_tool(name, use.input["text"])
        messages.append(
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": use.id, "content": result}],
            }
        )
    [last] = client(scripted).messages.create(messages=messages, **asked).content
    assert last.text == LOOP_SAID


def test_models_and_errors(scripted: Api) -> None:
    assert [model.id for model in client(scripted).models.list()] == [scripted.model]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client(scripted).messages.create(model="nobody", messages=user(), max_tokens=1)
    assert unknown.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client(scripted).messages.create(
            model=scripted.model, messages=user(), max_tokens=1, extra_body={"temperature": 3}
        )


def test_a_real_model(real: Api) -> None:
    answer = client(real).messages.create(model=real.model, messages=user(), max_tokens=8)
    assert answer.stop_reason in ("max_tokens", "end_turn")
    assert 0 < answer.usage.output_tokens <= 8
