"""What is too large, too slow or too many is refused clearly, before it costs anything."""

import asyncio
import select
import socket
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
import pytest_asyncio

from moebius_gateway import http_protocol
from moebius_gateway.api.size import MAX_CHARACTERS_PER_TOKEN
from moebius_gateway.text import model as text_model
from moebius_gateway.text.errors import PromptError
from moebius_gateway.text.model import TextModel
from moebius_gateway.types import FinishReason, GenerationError, Tokens
from tests.gateway.api.chatty import MODEL, chatty_files, tools
from tests.gateway.http_server import Gateway, ScriptedBackend, running_gateway, until_ready
from tests.gateway.test_template import conversation
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = {"max_header_bytes": 2000, "max_headers": 20, "max_messages": 3, "max_schema_bytes": 1000}
CHAT: dict[str, Any] = {"model": MODEL.id, "messages": [{"role": "user", "content": "Hi"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict() -> AsyncIterator[Gateway]:
    backend = ScriptedBackend(files=chatty_files(), known=[MODEL])
    async with running_gateway(backend, **LIMITS, max_request_timeout=50) as gateway:
        await until_ready(gateway)
        yield gateway


async def refusal(
    gateway: Gateway, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> dict[str, Any]:
    async with gateway.client() as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


async def test_too_many_messages(strict: Gateway) -> None:
    error = await refusal(strict, CHAT | {"messages": CHAT["messages"] * 4})
    assert error["param"] == "messages"
    assert "at most 3" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages/count_tokens"])
async def test_a_hopelessly_long_prompt_is_not_tokenized(
    strict: Gateway, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(TextModel, "_encode", never)
    text = "x" * (MODEL.max_model_len * MAX_CHARACTERS_PER_TOKEN + 1)
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL.id} | ({"prompt": text} if path == "/v1/completions" else {"messages": messages})
    if not path.endswith("count_tokens"):
        body |= {"stream": stream}
    error = await refusal(strict, body, path)
    assert f"{MODEL.max_model_len} tokens" in error["message"]
    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"


async def test_too_large_a_schema(strict: Gateway) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}}
    error = await refusal(strict, CHAT | {"tools": tools(parameters=schema)})
    assert error["param"] == "tools"
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = await refusal(strict, CHAT | {"response_format": wanted})
    assert error["param"].startswith("response_format")


@pytest.mark.parametrize("header", ["Timeout", "X-Request-Timeout"])
async def test_deadlines_come_from_either_header(strict: Gateway, header: str) -> None:
    async with strict.client() as client:
        before = time.monotonic()
        await client.post("/v1/chat/completions", json=CHAT, headers={header: "7.5"})
        deadline = strict.backend.generations[-1].deadline
        assert before + 7.5 <= deadline <= time.monotonic() + 7.5
        for wrong in ("0", "-1", "soon", "51", "nan"):
            answer = await client.post("/v1/chat/completions", json=CHAT, headers={header: wrong})
            assert answer.status_code == 400
            assert header in answer.json()["error"]["message"]


async def raw(gateway: Gateway, *pieces: bytes) -> bytes:
    """What comes back for these bytes until the connection is closed."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        return await asyncio.wait_for(reader.read(), PATIENCE)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 2000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"".join(b"A%d: x\r\n" % i for i in range(20)) + b"\r\n",
        b"GET /livez?" + b"x" * 2000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_too_large_a_head(strict: Gateway, head: bytes) -> None:
    answer = await raw(strict, head)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer


async def test_a_head_without_an_end_is_cut_off(strict: Gateway) -> None:
    """Pieces of one header, of which the parser would keep any number."""
    # What comes together with the first byte is not counted, and may be some of these.
    answer = await raw(strict, b"GET /livez HTTP/1.1\r\nA: ", *[b"x" * 500] * 4, b"x" * 1999)
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_head_that_never_comes_is_not_waited_for(
    strict: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.1)
    assert (await raw(strict, b"GET /livez HTTP/1.1\r\nA: ")).startswith(b"HTTP/1.1 408 ")


async def test_a_connection_on_which_nothing_comes_is_closed(
    strict: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.1)
    assert (await raw(strict)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "pieces",
    [
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"),
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", b"abc"),
    ],
)
async def test_what_comes_after_an_answer_and_is_no_request_keeps_no_connection(
    strict: Gateway, monkeypatch: pytest.MonkeyPatch, pieces: tuple[bytes, ...]
) -> None:
    made = http_protocol.BoundedProtocol.connection_made

    def hurried(protocol: http_protocol.BoundedProtocol, transport: asyncio.Transport) -> None:
        protocol.timeout_keep_alive = 0.2
        made(protocol, transport)

    monkeypatch.setattr(http_protocol.BoundedProtocol, "connection_made", hurried)
    assert (await raw(strict, *pieces)).count(b"HTTP/1.1 ") == 1


async def test_a_wish_for_another_protocol_costs_no_body(strict: Gateway) -> None:
    """As Java's own client has it with every request; the parser took the body for that protocol's."""
    strict.backend.reset()

    def asked(body: bytes) -> tuple[bytes, bytes]:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        head += b"Content-Length: %d\r\nHost: x\r\nHTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n" % len(body)
        return head + b"Content-Type: application/json\r\n\r\n", body

    last = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    head, body = asked(orjson.dumps(CHAT))
    for pieces in (
        (head + body + last,),
        (head + body, last),
        (head, body, last),
        *(
            (head[:cut], head[cut:], body, last)
            for cut in (30, *range(head.index(b"\r\nUpgrade:"), len(head)))
        ),
        (*(bytes([byte]) for byte in head), body, last),
        (b"\r\n\r\n" + head + body, last),
    ):
        answer = await raw(strict, *pieces)
        assert answer.count(b"HTTP/1.1 200 OK") == 2, answer
    # Wherever one request ends and the next begins.
    for pieces in ((2 * (head + body) + last,), (head, body[:-5], body[-5:] + head + body, last)):
        answer = await raw(strict, *pieces)
        assert answer.count(b"HTTP/1.1 200 OK") == 3, answer
    chunks = b"%x\r\n%b\r\n0\r\nUpgrade: h2c\r\n\r\n" % (len(body), body)
    chunked = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    answer = await raw(strict, chunked + chunks + head + body + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 3, answer
    expecting = head.replace(b"Host: x", b"Expect: 100-continue\r\nHost: x")
    answer = await raw(strict, expecting, body, last)
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")
    assert answer.endswith(b'{"status":"alive"}'), answer
    wrong = b"POST /x HTTP/1.1\r\nUpgrade: h2c\r\nHost: x\r\n\n" + head
    answer = await raw(strict, wrong)
    assert answer.count(b"HTTP/1.1 400 ") == 1, answer
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    # Neither is a line's end held back that belongs to no head's.
    assert (await raw(strict, b"GET /livez HTTP/1.1\r\nHost: x\r\n\n")).startswith(b"HTTP/1.1 400 ")
    # What looks like a header in a body is none, and as long as it is.
    no_header = b"\r\nUpgrade: no\r\n"
    head, body = asked(orjson.dumps(CHAT) + no_header)
    for pieces in ((head + body, last), (head, body, last), (head + body[:-15], body[-15:], last)):
        answer = await raw(strict, *pieces)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.endswith(b'{"status":"alive"}'), answer
    strict.backend.reset()


@pytest.mark.timed
async def test_who_leaves_with_several_requests_on_their_way_ends_them_all(
    strict: Gateway, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the last of them used to be told."""
    never = asyncio.Event()
    strict.backend.reset()
    strict.backend.script = lambda _: [*strict.backend.say("Hello")[:1], never]
    body = orjson.dumps({"model": MODEL.id, "prompt": [5], "stream": True})
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    reader, writer = await asyncio.open_connection(*strict.address)
    try:
        writer.write(request * 3)
        await asyncio.wait_for(reader.readuntil(b"data: "), 5)
        assert strict.backend.running == 1
    finally:
        writer.transport.abort()
    await until(lambda: not strict.backend.running)
    await asyncio.sleep(0.1)
    assert len(strict.backend.generations) == 1
    assert "Traceback" not in capfd.readouterr().err
    strict.backend.reset()


async def test_an_answer_is_not_cut_off_because_the_next_head_is_slow(
    strict: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.05)
    may_end = asyncio.Event()
    strict.backend.script = lambda _: [may_end, *strict.backend.say("Hello")]
    asyncio.get_running_loop().call_later(0.3, may_end.set)
    body = orjson.dumps({"model": MODEL.id, "prompt": [5]})
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    first += b"Content-Length: %d\r\n\r\n" % len(body) + body
    try:
        assert b"Hello" in await raw(strict, first, b"GET /livez HTTP/1.1\r\nA: ")
    except TimeoutError:
        pytest.fail("the connection was neither answered nor closed")
    finally:
        strict.backend.reset()


@pytest.mark.parametrize("asked", [{"stream": True}, {"stream": False}])
async def test_a_connection_is_not_kept_for_what_nobody_reads(
    strict: Gateway, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """What had been written had to be read first, however long that took."""
    monkeypatch.setattr(http_protocol, "UNREAD_SECONDS", 0.1)
    strict.backend.reset()
    strict.backend.script = lambda _: [Tokens((5,))] * 8_000 + [Tokens((), (), FinishReason.LENGTH)]
    body = orjson.dumps(CHAT | {"logprobs": True, "top_logprobs": 20, "ignore_eos": True} | asked)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Request-Timeout: 20\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    head = head if not asked["stream"] else head.replace(b": 20", b": 2")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(strict.address)
        client.sendall(head + body)
        ended = select.poll()
        # Its end is told, whatever is registered.
        ended.register(client, 0)
        await until(lambda: ended.poll(0))
    strict.backend.reset()


@pytest.mark.timed
async def test_who_reads_slowly_gets_all_of_it(strict: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "UNREAD_SECONDS", 0.3)
    strict.backend.reset()
    strict.backend.script = lambda _: [Tokens((5,))] * 8_000 + [Tokens((), (), FinishReason.LENGTH)]
    body = orjson.dumps(CHAT | {"logprobs": True, "top_logprobs": 20, "ignore_eos": True})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    loop = asyncio.get_running_loop()
    received = bytearray()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(strict.address)
        client.setblocking(False)
        await loop.sock_sendall(client, head + body)
        # At first so slowly that the kernel, which has megabytes of it, asks for no more between two looks.
        while piece := await loop.sock_recv(client, 1 << 15):
            received += piece
            await asyncio.sleep(0.01 if len(received) < 3_000_000 else 0)
    (_, _, answer) = bytes(received).partition(b"\r\n\r\n")
    assert len(orjson.loads(answer)["choices"][0]["logprobs"]["content"]) == 8_000
    strict.backend.reset()


async def test_one_connection_may_ask_often(strict: Gateway) -> None:
    """Limits are those of a request, not of a connection."""
    request = b"GET /livez HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 1500 + b"\r\n\r\n"
    last = request.replace(b"Host", b"Connection: close\r\nHost")
    answer = await raw(strict, *[request] * 5, last)
    assert answer.count(b"HTTP/1.1 200 ") == 6
    at_once = request * 50
    answer = await raw(strict, at_once + last[:-5], last[-5:])
    assert answer.count(b"HTTP/1.1 200 ") == 51


LOOP = "{% for a in range(9999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.timed
async def test_a_template_that_loops_for_ever_is_ended_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_model, "TEMPLATE_SECONDS", 0.3)
    model = TextModel(chatty_files() | {"chat_template.jinja": LOOP.encode()})
    looping = [asyncio.create_task(model.encode_chat(conversation())) for _ in range(12)]
    gaps, begun = [], time.monotonic()
    while not all(task.done() for task in looping):
        before = time.monotonic()
        await asyncio.sleep(0.005)
        gaps.append(time.monotonic() - before)
    first, *others = [task.exception() for task in looping]
    assert isinstance(first, PromptError)
    assert "longer than 0.3 seconds" in str(first)
    # Its own messages may be all right.
    last = others[-1]
    assert isinstance(last, GenerationError)
    assert "of other requests" in str(last)
    assert last.retryable
    assert statistics.median(gaps) < 0.1, "the event loop was held up"
    assert time.monotonic() - begun < 12 * 0.3, "they did not wait for one another's end"
    monkeypatch.setattr(text_model, "TEMPLATE_SECONDS", 10.0)
    other = TextModel(chatty_files())
    assert (await asyncio.wait_for(other.encode_chat(conversation()), 2)).ids
