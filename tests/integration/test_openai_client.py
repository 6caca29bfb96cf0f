"""The unmodified `openai` client against the whole stack."""

import time

import openai
import pytest

from tests.stack import Stack
from tests.tiny import VOCAB_SIZE
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
MESSAGES = [{"role": "user", "content": "The capital of France?"}]


@pytest.fixture
def client(tiny_stack: Stack) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{tiny_stack.url}/v1", api_key="none", max_retries=0, timeout=60)


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = (await client.models.list()).data
    assert [model.id for model in models] == ["tiny-mixtral"]
    assert (await client.models.retrieve("tiny-mixtral")).id == "tiny-mixtral"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nobody")


async def test_streamed_chat_equals_plain_chat(client: openai.AsyncOpenAI) -> None:
    ask = {"model": "tiny-mixtral", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    plain = await client.chat.completions.create(**ask)
    assert plain.choices[0].message.role == "assistant"
    assert plain.choices[0].message.content
    assert plain.usage is not None
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens

    text, finish, usage = "", None, None
    stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == plain.choices[0].message.content
    assert finish == plain.choices[0].finish_reason
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (
        plain.usage.prompt_tokens,
        plain.usage.completion_tokens,
    )


async def test_n_choices_draw_differently_and_repeat_with_their_seed(client: openai.AsyncOpenAI) -> None:
    ask = {
        "model": "tiny-mixtral",
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": 1.0,
        "n": 2,
        "seed": 7,
    }
    one = await client.chat.completions.create(**ask)
    two = await client.chat.completions.create(**ask)
    texts = [choice.message.content for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert texts == [choice.message.content for choice in two.choices]
    other = await client.chat.completions.create(**(ask | {"seed": 8}))
    assert texts != [choice.message.content for choice in other.choices]


async def test_chat_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny-mixtral",
        messages=MESSAGES,
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        # Greedy: the sampled token is the best one.
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob, abs=1e-5)
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


async def test_completions_and_stop(client: openai.AsyncOpenAI) -> None:
    ask = {"model": "tiny-mixtral", "prompt": "def main():", "max_tokens": 40, "temperature": 0}
    whole = (await client.completions.create(**ask)).choices[0].text
    # A stop string that the model says for sure: what stands in the middle of its own text.
    stop = whole[len(whole) // 2 :][:3]
    cut = await client.completions.create(**ask, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


async def test_bad_parameters_are_refused_by_name(client: openai.AsyncOpenAI) -> None:
    ask = {"model": "tiny-mixtral", "messages": MESSAGES}
    for parameter, value in {
        "temperature": -1,
        "top_p": 1.5,
        "n": 0,
        "max_tokens": 0,
        "logit_bias": {"x": 1},
    }.items():
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**ask, **{parameter: value})
        assert parameter in str(refused.value.param)
    with pytest.raises(openai.BadRequestError) as unknown:
        await client.chat.completions.create(**ask, extra_body={"speed": "ludicrous"})
    assert unknown.value.param == "speed"
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model="tiny-mixtral", prompt=[5] * 100_000, max_tokens=1)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="tiny-mixtral", prompt=[VOCAB_SIZE + 5], max_tokens=1)
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="nobody", messages=MESSAGES)


@pytest.mark.timed
async def test_a_client_that_leaves_frees_its_slot(tiny_stack: Stack, client: openai.AsyncOpenAI) -> None:
    async def idle() -> bool:
        workers = (await tiny_stack.view()).workers
        in_flight = await tiny_stack.metric("moebius_gateway_requests_in_flight")
        return in_flight == 0 and all(worker.state == "READY" and worker.running == 0 for worker in workers)

    async with await client.completions.create(
        model="tiny-mixtral",
        prompt="Once",
        max_tokens=1500,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        await anext(aiter(stream))
        assert await tiny_stack.metric("moebius_gateway_requests_in_flight") == 1
    left = time.monotonic()
    await until(idle, "nothing is running")
    # The whole answer takes some seconds.
    assert time.monotonic() - left < 1
