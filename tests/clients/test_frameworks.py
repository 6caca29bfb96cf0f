"""Frameworks over the API: langchain-openai, pydantic-ai, openai-agents, litellm."""

from collections.abc import Iterator
from typing import Any, Literal

import litellm
import openai
import pytest
from agents import (
    Agent as LoopAgent,
)
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.asking import LOOP_SAID, SAID, STEPS, WORDS, run_tool, user
from tests.clients.conftest import Api


class Weather(BaseModel):
    city: str
    sky: Literal["clear", "cloudy"]
    degrees: int


# ---- langchain-openai -------------------------------------------------------------------------------


def langchain(api: Api, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=api.v1, api_key="none", model=api.model, max_retries=0, **more)


@pytest.mark.timed
@pytest.mark.parametrize("responses", [False, True])
def test_langchain_says_and_streams(scripted: Api, responses: bool) -> None:
    chat = langchain(scripted, use_responses_api=responses)
    answer = chat.invoke(WORDS)
    assert answer.text == SAID
    assert answer.usage_metadata is not None
    texts = [chunk.text for chunk in chat.stream(WORDS) if chunk.text]
    assert "".join(texts) == SAID
    # What the gateway finds there at a time is one piece: after a pause perhaps all.
    assert len(texts) > 1


def test_langchain_calls_tools(scripted: Api) -> None:
    @tool
    def search(text: str) -> str:
        """Searches."""
        return run_tool("search", text)

    chat = langchain(scripted).bind_tools([search])
    asked = chat.invoke("go")
    [call] = asked.tool_calls
    result = search.invoke(call)
    assert isinstance(result, ToolMessage)
    assert chat.invoke([("user", "go"), asked, result]).text == "Done: search(go)."


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_what_is_structured(sim: Api, method: Any) -> None:
    chat = langchain(sim, max_tokens=2000).with_structured_output(Weather, method=method)
    assert isinstance(chat.invoke(WORDS), Weather)


# ---- pydantic-ai ------------------------------------------------------------------------------------


def pydantic_model(api: Api) -> OpenAIChatModel:
    return OpenAIChatModel(api.model, provider=OpenAIProvider(base_url=api.v1, api_key="none"))


@pytest.mark.parametrize("kind", [NativeOutput, ToolOutput])
def test_pydantic_ai_gets_what_is_structured(sim: Api, kind: Any) -> None:
    agent = Agent(pydantic_model(sim), output_type=kind(Weather), model_settings={"max_tokens": 2000})
    assert isinstance(agent.run_sync(WORDS).output, Weather)


async def test_pydantic_ai_runs_an_agent(scripted: Api) -> None:
    agent = Agent(pydantic_model(scripted))
    for name in STEPS:
        agent.tool_plain(name=name)(_tool(name))
    assert (await agent.run("go")).output == LOOP_SAID
    async with agent.run_stream(WORDS, toolsets=[]) as stream:
        assert await stream.get_output()


# ---- openai-agents ----------------------------------------------------------------------------------


def _tool(name: str) -> Any:
    def run(text: str) -> str:
        return run_tool(name, text)

    run.__name__, run.__doc__ = name, name
    return run


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents_run_a_loop_of_five_turns(scripted: Api, kind: Any, streamed: bool) -> None:
    set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=scripted.v1, api_key="none", max_retries=0) as client:
        agent = LoopAgent(
            name="clerk",
            instructions="Go through all steps.",
            model=kind(model=scripted.model, openai_client=client),
            tools=[function_tool(_tool(name)) for name in STEPS],
            model_settings=ModelSettings(max_tokens=500),
        )
        if streamed:
            result: Any = Runner.run_streamed(agent, "go")
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, "go")
    assert result.final_output == LOOP_SAID
    assert len(result.raw_responses) == 5


# ---- litellm ----------------------------------------------------------------------------------------


@pytest.fixture
def plain_litellm() -> Iterator[None]:
    litellm.telemetry = False
    return


def litellm_settings(api: Api, provider: str) -> dict[str, Any]:
    base = api.v1 if provider == "openai" else api.url
    return {"model": f"{provider}/{api.model}", "api_base": base, "api_key": "none", "max_tokens": 200}


@pytest.mark.usefixtures("plain_litellm")
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm_says_and_streams(scripted: Api, provider: str) -> None:
    settings = litellm_settings(scripted, "openai" if provider == "openai" else provider)
    if provider == "hosted_vllm":
        settings["api_base"] = scripted.v1
    answer = litellm.completion(messages=user(), **settings)
    assert answer.choices[0].message.content == SAID
    assert answer.usage.completion_tokens > 0
    stream = litellm.completion(messages=user(), stream=True, **settings)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == SAID


@pytest.mark.usefixtures("plain_litellm")
def test_litellm_knows_our_errors(scripted: Api) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            messages=user(),
            num_retries=0,
            **litellm_settings(scripted, "openai") | {"model": "openai/nobody"},
        )
