"""The `openai` package of Python: chat, completions, responses, models, errors, an agent's loop."""

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.clients.asking import LOOP_SAID, SAID, STEPS, WORDS, function, run_tool, user
from tests.clients.conftest import Api


def client(api: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=api.v1, api_key="none", max_retries=0, timeout=30)


def test_chat_in_one_piece(scripted: Api) -> None:
    answer = client(scripted).chat.completions.create(model=scripted.model, messages=user())
    assert answer.choices[0].message.content == SAID
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_as_a_stream(scripted: Api) -> None:
    with client(scripted).chat.completions.stream(
        model=scripted.model, messages=user(), stream_options={"include_usage": True}
    ) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert said == final.choices[0].message.content == SAID
    assert final.usage is not None
    assert final.usage.completion_tokens > 0


def test_reasoning_comes_apart(scripted: Api) -> None:
    chat = client(scripted).chat.completions.create(model=scripted.model, messages=user("think"))
    message = chat.choices[0].message.model_dump()
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "You said: think")


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agents_loop_of_five_turns(scripted: Api, streamed: bool) -> None:
    chat = client(scripted).chat.completions
    messages: list[Any] = user("go")
    asked: dict[str, Any] = {"model": scripted.model, "tools": [function(name) for name in STEPS]}
    for name in STEPS:
        if streamed:
            with chat.stream(messages=messages, **asked) as stream:
                choice: Any = stream.get_final_completion().choices[0]
        else:
            choice = chat.create(messages=messages, **asked).choices[0]
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert call.function.name == name
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for sent in messages[-1]["tool_calls"]:
            sent["function"].pop("parsed_arguments", None)
        result = run_tool(name, json.loads(call.function.arguments)["text"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert chat.create(messages=messages, **asked).choices[0].message.content == LOOP_SAID


def test_log_probabilities_and_several_choices(scripted: Api) -> None:
    answer = client(scripted).chat.completions.create(
        model=scripted.model, messages=user("Hi"), n=2, logprobs=True, max_tokens=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].finish_reason == "length"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == answer.choices[0].message.content


def test_plain_completions(scripted: Api) -> None:
    answer = client(scripted).completions.create(model=scripted.model, prompt=["Hi", "Ho"], max_tokens=100)
    assert [choice.text for choice in answer.choices] == ["You said: Hi", "You said: Ho"]
    stream = client(scripted).completions.create(model=scripted.model, prompt="Hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "You said: Hi"


def test_responses_and_their_thread(scripted: Api) -> None:
    responses = client(scripted).responses
    first = responses.create(model=scripted.model, input="think", instructions="Be brief.")
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert first.output_text == "You said: think"
    second = responses.create(model=scripted.model, input=WORDS, previous_response_id=first.id)
    assert second.output_text == SAID
    assert responses.retrieve(second.id).output_text == SAID
    items = responses.input_items.list(second.id)
    assert items.data[0].type == "message"
    responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(second.id)


def test_responses_as_a_stream(scripted: Api) -> None:
    with client(scripted).responses.stream(model=scripted.model, input="think") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "You said: think"
    assert final.status == "completed"
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.reasoning_text.delta" in kinds


def test_models(scripted: Api) -> None:
    assert [model.id for model in client(scripted).models.list()] == [scripted.model]
    assert client(scripted).models.retrieve(scripted.model).id == scripted.model


def test_errors_are_its_exceptions(scripted: Api) -> None:
    chat = client(scripted).chat.completions
    with pytest.raises(openai.NotFoundError) as unknown:
        chat.create(model="nobody", messages=user())
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        chat.create(model=scripted.model, messages=user(), temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unserved:
        client(scripted).embeddings.create(model=scripted.model, input="Hi")
    assert unserved.value.code == "unsupported_endpoint"


class Weather(BaseModel):
    city: str
    sky: Literal["clear", "cloudy"]
    degrees: int


def test_parsed_answers(sim: Api) -> None:
    """The engine says random words: that they are a `Weather` is the grammar's doing."""
    chat = client(sim).chat.completions.parse(
        model=sim.model, messages=user(), response_format=Weather, max_tokens=2000
    )
    assert isinstance(chat.choices[0].message.parsed, Weather)
    response = client(sim).responses.parse(
        model=sim.model, input=WORDS, text_format=Weather, max_output_tokens=2000
    )
    assert isinstance(response.output_parsed, Weather)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "read"}}])
def test_a_call_that_is_required_is_made(sim: Api, choice: Any) -> None:
    answer = client(sim).chat.completions.create(
        model=sim.model,
        messages=user(),
        tools=[function(name, strict=True) for name in STEPS],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=2000,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in (STEPS if choice == "required" else ("read",))
    assert isinstance(json.loads(call.function.arguments)["text"], str)


def test_a_real_model(real: Api) -> None:
    """End to end: what is streamed is what is said in one piece, and a schema is kept to."""
    chat = client(real).chat.completions
    asked: dict[str, Any] = {"model": real.model, "messages": user(), "seed": 7, "max_tokens": 40}
    whole = chat.create(**asked)
    parts = [chunk.choices[0].delta.content or "" for chunk in chat.create(**asked, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0
    colour = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema = {"name": "answer", "schema": colour | {"additionalProperties": False}, "strict": True}
    kept = chat.create(**asked, response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(kept.choices[0].message.content or "")["ok"] in (True, False)
