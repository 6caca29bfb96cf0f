"""The unmodified `openai` client against the HTTP side, over a scripted backend."""

from typing import Any

import openai
import pytest

from moebius_gateway.types import FinishReason, GenerationError, Reason, Tokens
from tests.gateway.http_server import MODEL, Gateway
from tests.tiny import EOS_TOKEN_ID

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT: dict[str, Any] = {"model": MODEL.id, "messages": [{"role": "user", "content": "Hi"}]}
PLAIN: dict[str, Any] = {"model": MODEL.id, "prompt": "Hi"}


async def test_chat(gateway: Gateway) -> None:
    answer = await gateway.openai().chat.completions.create(**CHAT)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "Hello 🙂!",
        "stop",
    )
    assert (answer.object, answer.model) == ("chat.completion", MODEL.id)
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    # Bytes of the text, and the stop token.
    assert answer.usage.completion_tokens == len("Hello 🙂!".encode()) + 1
    assert answer.usage.prompt_tokens == len(gateway.backend.generations[0].prompt_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_streamed_chat(gateway: Gateway) -> None:
    stream = await gateway.openai().chat.completions.create(**CHAT, stream=True)
    chunks = [chunk async for chunk in stream]
    assert len({(chunk.id, chunk.object, chunk.created) for chunk in chunks}) == 1
    assert all(chunk.usage is None and "usage" not in chunk.model_fields_set for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-1]] == [*"Hello ", "🙂", "!"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert not chunks[-1].choices[0].delta.content
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])


async def test_usage_comes_last_and_is_null_before(gateway: Gateway) -> None:
    say = gateway.backend.say("Hi")
    gateway.backend.script = lambda _: [Tokens(say[0].token_ids, cached_tokens=3), *say[1:]]
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    for stream in (
        await gateway.openai().chat.completions.create(**CHAT, **options),
        await gateway.openai().completions.create(**PLAIN, **options),
    ):
        *chunks, last = [chunk async for chunk in stream]
        assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
        assert last.choices == []
        assert last.usage.completion_tokens == 3
        assert last.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("n", [1, 2])
async def test_usage_until_now_comes_with_every_chunk(gateway: Gateway, n: int) -> None:
    """Benchmark clients count tokens by it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked: dict[str, Any] = {"stream": True, "stream_options": options, "n": n}
    for stream in (
        await gateway.openai().chat.completions.create(**CHAT, **asked),
        await gateway.openai().completions.create(**PLAIN, **asked),
    ):
        *chunks, last = [chunk async for chunk in stream]
        of_choices = []
        for index in range(n):
            mine = [chunk.usage for chunk in chunks if chunk.choices[0].index == index]
            counts = [usage.completion_tokens for usage in mine]
            assert counts == sorted(counts)
            assert len(set(counts)) > 3
            assert {usage.prompt_tokens for usage in mine} == {last.usage.prompt_tokens}
            of_choices.append(counts[-1])
        assert sum(of_choices) == last.usage.completion_tokens


async def test_completions_take_text_and_token_ids_one_or_many(gateway: Gateway) -> None:
    for prompt, count in [("Hi", 1), (["Hi", "Ho"], 2), ([70, 71], 1), ([[70, 71], [72]], 2)]:
        gateway.backend.reset()
        answer = await gateway.openai().completions.create(model=MODEL.id, prompt=prompt, n=2)
        assert [choice.index for choice in answer.choices] == list(range(2 * count))
        assert all(choice.text == "Hello 🙂!" for choice in answer.choices)
        sent = [generation.prompt_ids for generation in gateway.backend.generations]
        # Each prompt is counted once, however many choices it has.
        assert answer.usage.prompt_tokens == sum(map(len, sent)) / 2
    assert sent == [(70, 71), (70, 71), (72,), (72,)]


async def test_streamed_completions_interleave_their_choices(gateway: Gateway) -> None:
    gateway.backend.script = lambda generation: gateway.backend.say(f"<{generation.sampling.seed % 10}>")
    stream = await gateway.openai().completions.create(**PLAIN, n=3, seed=3, stream=True)
    texts, finished, order = ["", "", ""], set(), []
    async for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index] += choice.text
        order.append(choice.index)
        if choice.finish_reason:
            finished.add(choice.index)
    seeds = [generation.sampling.seed for generation in gateway.backend.generations]
    assert seeds[0] == 3
    assert len(set(seeds)) == 3
    assert texts == [f"<{seed % 10}>" for seed in seeds]
    assert finished == {0, 1, 2}
    assert order != sorted(order), "the choices came one after the other"


async def test_chat_logprobs(gateway: Gateway) -> None:
    answer = await gateway.openai().chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    said = b"".join(bytes(token.bytes or ()) for token in logprobs.content)
    assert said.decode() == answer.choices[0].message.content
    assert [token.logprob for token in logprobs.content] == [-0.5] * len(said)
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    assert logprobs.content[6].token == "\\xf0"

    stream = await gateway.openai().chat.completions.create(**CHAT, logprobs=True, stream=True)
    streamed = [
        entry async for chunk in stream for entry in (chunk.choices[0].logprobs or NOTHING).content or []
    ]
    assert [token.token for token in streamed] == [token.token for token in logprobs.content]
    assert gateway.backend.generations[-1].sampling.logprobs == 0


NOTHING = openai.types.chat.chat_completion_chunk.ChoiceLogprobs(content=None)


async def test_completion_logprobs(gateway: Gateway) -> None:
    answer = await gateway.openai().completions.create(**PLAIN, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens[:7] == [*"Hello ", "bytes:\\xf0"]
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7]
    # The chosen token is among them even if it is not one of the best.
    assert all(len(top) == 3 and "!" not in top for top in logprobs.top_logprobs[:-1])
    assert logprobs.top_logprobs[-1]["!"] == logprobs.token_logprobs[-1] == -0.5


async def test_stop_cuts_the_text_and_the_generation(gateway: Gateway) -> None:
    gateway.backend.script = lambda _: gateway.backend.say("one two three")
    answer = await gateway.openai().chat.completions.create(**CHAT, stop=["three", "wo "])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one t", "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("one two ")
    assert gateway.backend.running == 0, "the generation was not ended at its worker"
    single = await gateway.openai().completions.create(**PLAIN, stop=" ")
    assert single.choices[0].text == "one"


async def test_length(gateway: Gateway) -> None:
    gateway.backend.script = lambda _: gateway.backend.say("abc", finish=FinishReason.LENGTH)
    answer = await gateway.openai().chat.completions.create(**CHAT, max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "length")


async def test_an_answer_can_be_sent_back(gateway: Gateway) -> None:
    answer = await gateway.openai().chat.completions.create(**CHAT)
    history = [*CHAT["messages"], answer.choices[0].message, {"role": "user", "content": "And?"}]
    await gateway.openai().chat.completions.create(model=MODEL.id, messages=history)
    assert "Hello 🙂!" in gateway.backend.text._tokenizer.decode(gateway.backend.generations[-1].prompt_ids)


async def test_models(gateway: Gateway) -> None:
    [listed] = (await gateway.openai().models.list()).data
    model = await gateway.openai().models.retrieve(MODEL.id)
    assert model == listed
    assert (model.id, model.created, model.object) == (MODEL.id, MODEL.created, "model")
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == MODEL.max_model_len
    with pytest.raises(openai.NotFoundError) as missing:
        await gateway.openai().models.retrieve("nobody/nothing")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("reason", "retryable", "error", "status"),
    [
        (Reason.OVERLOADED, True, openai.RateLimitError, 429),
        (Reason.NOT_READY, True, openai.InternalServerError, 503),
        (Reason.DRAINING, True, openai.InternalServerError, 503),
        (Reason.ENGINE_DEAD, True, openai.InternalServerError, 503),
        (Reason.ENGINE_STALLED, True, openai.InternalServerError, 503),
        (Reason.GPU_FAULT, True, openai.InternalServerError, 503),
        (Reason.KV_EXHAUSTED, False, openai.BadRequestError, 400),
        (Reason.BAD_REQUEST, False, openai.BadRequestError, 400),
        (Reason.POISONED, False, openai.InternalServerError, 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_error_classes(
    gateway: Gateway,
    reason: Reason,
    retryable: bool,
    error: type[openai.APIStatusError],
    status: int,
    stream: bool,
) -> None:
    failure = GenerationError(reason, "because", retryable=retryable, retry_after=1.5 if retryable else 0)
    gateway.backend.script = lambda _: [failure]
    with pytest.raises(error) as raised:
        await gateway.openai().chat.completions.create(**CHAT, stream=stream)
    assert raised.value.status_code == status
    assert raised.value.code == reason.value.lower()
    assert "because" in raised.value.message
    assert raised.value.response.headers.get("retry-after") == ("2" if retryable else None)


async def test_a_poisoned_request_is_not_sent_again_by_the_client(gateway: Gateway) -> None:
    gateway.backend.script = lambda _: [GenerationError(Reason.POISONED, "it kills", retryable=False)]
    with pytest.raises(openai.InternalServerError):
        await gateway.openai(max_retries=3).chat.completions.create(**CHAT)
    assert len(gateway.backend.generations) == 1


async def test_an_error_in_a_stream_is_raised_behind_its_text(gateway: Gateway) -> None:
    failure = GenerationError(Reason.GPU_FAULT, "it died", retryable=True)
    gateway.backend.script = lambda _: [
        *gateway.backend.say("some", finish=FinishReason.LENGTH)[:-1],
        failure,
    ]
    stream = await gateway.openai().chat.completions.create(**CHAT, stream=True)
    chunks: list[Any] = []

    async def read() -> None:
        async for chunk in stream:
            chunks.append(chunk.choices[0])

    with pytest.raises(openai.APIError, match="it died"):
        await read()
    assert "".join(choice.delta.content for choice in chunks) == "som"
    assert all(choice.finish_reason is None for choice in chunks)
    assert gateway.metric("moebius_gateway_stream_errors_total", code="gpu_fault") == 1


async def test_parameters_reach_the_worker(gateway: Gateway) -> None:
    await gateway.openai().chat.completions.create(
        **CHAT,
        seed=-5,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1.5,
        logit_bias={"7": -100, "8": 2},
        max_completion_tokens=9,
        user="me",
        metadata={"a": "b"},
        stop=["<|im_start|>", "x"],
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [9],
        },
    )
    [generation] = gateway.backend.generations
    sampling = generation.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_p, sampling.top_k) == (2**64 - 5, 0.5, 0.9, 5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.5)
    assert sampling.logit_bias == {7: -100.0, 8: 2.0}
    assert sampling.logprobs is None
    assert (generation.max_tokens, generation.min_tokens) == (9, 2)
    # A special token has no text: as a stop string it is its id.
    assert generation.stop_token_ids == (1, EOS_TOKEN_ID, 9)


async def test_defaults(gateway: Gateway) -> None:
    await gateway.openai().chat.completions.create(**CHAT)
    await gateway.openai().chat.completions.create(
        **CHAT, max_tokens=10**9, extra_body={"ignore_eos": True, "top_k": -1}
    )
    one, two = gateway.backend.generations
    assert one.max_tokens == two.max_tokens == MODEL.max_model_len - len(one.prompt_ids)
    assert (one.stop_token_ids, two.stop_token_ids) == ((EOS_TOKEN_ID,), ())
    assert one.sampling.seed != two.sampling.seed
    assert (one.sampling.temperature, two.sampling.top_k) == (1.0, 0)
