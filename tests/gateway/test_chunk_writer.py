"""The short way of chunks to their connections: in order, whole, and for clients that are there."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from moebius_gateway.api.sse import KEEP_ALIVE, EventSender
from moebius_gateway.chunk_writer import MAX_WAITING, ChunkBatch, ChunkWriter

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Connection:
    """A transport that notes what is written to all."""

    def __init__(self, name: str, written: list[tuple[str, bytes]]) -> None:
        self.name, self.written, self.closing = name, written, False

    def write(self, data: bytes) -> None:
        if self.closing:
            raise RuntimeError("unable to perform operation on a closed transport")
        self.written.append((self.name, data))

    def is_closing(self) -> bool:
        return self.closing


def response(connection: Connection, **differences: Any) -> Any:
    """As the server has it in the middle of a chunked body."""
    state = {"chunked_encoding": True, "response_complete": False, "disconnected": False}
    flow = SimpleNamespace(write_paused=False)
    return SimpleNamespace(transport=connection, flow=flow, **(state | differences))


@pytest.fixture
def written() -> list[tuple[str, bytes]]:
    return []


async def test_what_tasks_write_in_one_turn_of_the_loop_is_written_behind_them(written: list[Any]) -> None:
    batch = ChunkBatch()
    writers = [ChunkWriter(response(Connection(name, written)), batch) for name in "ab"]
    seen = []

    async def produce(writer: ChunkWriter, data: bytes) -> None:
        assert writer.write(data)
        seen.append(len(written))

    await asyncio.gather(*(produce(writer, data) for writer in writers for data in (b"one", b"x" * 17)))
    await asyncio.sleep(0)
    assert seen == [0, 0, 0, 0]
    chunks = [b"3\r\none\r\n", b"11\r\n" + b"x" * 17 + b"\r\n"]
    assert written == [(name, chunk) for name in "ab" for chunk in chunks]


async def test_what_was_written_comes_before_what_is_sent_otherwise(written: list[Any]) -> None:
    connection = Connection("a", written)
    writer = ChunkWriter(response(connection), ChunkBatch())
    writer.write(b"one")
    writer.flush()
    connection.write(b"end")
    await asyncio.sleep(0)
    assert written == [("a", b"3\r\none\r\n"), ("a", b"end")]


@pytest.mark.parametrize(
    "difference",
    [
        {"chunked_encoding": None},
        {"chunked_encoding": False},
        {"response_complete": True},
        {"disconnected": True},
    ],
)
async def test_what_is_no_middle_of_a_chunked_body_is_left_to_the_server(
    written: list[Any], difference: dict[str, Any]
) -> None:
    writer = ChunkWriter(response(Connection("a", written), **difference), ChunkBatch())
    assert not writer.write(b"one")
    writer.flush()
    assert written == []


async def test_a_client_that_makes_no_room_is_waited_for(written: list[Any]) -> None:
    its = response(Connection("a", written))
    its.flow.write_paused = True
    assert not ChunkWriter(its, ChunkBatch()).write(b"one")


async def test_a_client_that_leaves_costs_the_others_nothing(written: list[Any]) -> None:
    batch = ChunkBatch()
    gone, here = Connection("a", written), Connection("b", written)
    for connection in (gone, here):
        ChunkWriter(response(connection), batch).write(b"one")
    gone.closing = True
    await asyncio.sleep(0)
    assert written == [("b", b"3\r\none\r\n")]


async def test_what_waits_is_bounded(written: list[Any]) -> None:
    """Else an answer that is made without a pause would never notice that its client makes no room."""
    writer = ChunkWriter(response(Connection("a", written)), ChunkBatch())
    for _ in range(3):
        writer.write(b"x" * (MAX_WAITING // 2))
    assert len(written) >= 2


async def test_nothing_passes_the_end_that_waits_for_room(written: list[Any]) -> None:
    """A chunk behind the end would be read as the beginning of the connection's next answer."""
    connection: Any = Connection("a", written)
    flow, log = FlowControl(connection), logging.getLogger(__name__)
    cycle = RequestResponseCycle(
        scope={"type": "http", "method": "POST"},  # type: ignore[typeddict-item]
        transport=connection,
        flow=flow,
        logger=log,
        access_logger=log,
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )
    sender = EventSender(cycle.send, ChunkWriter(cycle, ChunkBatch()))  # type: ignore[arg-type]
    await sender.send(b"one")
    flow.pause_writing()
    end = asyncio.create_task(sender.send(b"end", more=False))
    await asyncio.sleep(0)
    # It is about to run when the client makes room, and so runs before the one that waited for that.
    late = asyncio.create_task(sender.send(KEEP_ALIVE))
    flow.resume_writing()
    await asyncio.gather(end, late)
    await asyncio.sleep(0)
    assert [data for _, data in written[1:]] == [b"3\r\none\r\n", b"3\r\nend\r\n0\r\n\r\n"]
