import socket
import threading
import time
from collections.abc import Iterator

import pytest

from moebius_proto.worker.v1 import engine_pb2, worker_pb2
from moebius_worker.engine.pipe import FrontGoneError, Pipe
from moebius_worker.framing import FrameError, FrameReader, encode
from tests.waiting import PATIENCE


@pytest.fixture
def pair() -> Iterator[tuple[Pipe, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Pipe(ours), theirs


def cancel(handle: int) -> engine_pb2.FrontFrame:
    return engine_pb2.FrontFrame(cancel=worker_pb2.Cancel(handle=handle))


@pytest.mark.timed
def test_nothing_there_is_no_wait_and_a_wait_of_the_timeout(pair: tuple[Pipe, socket.socket]) -> None:
    pipe, _ = pair

    def seconds(timeout: float) -> float:
        start = time.monotonic()
        assert pipe.receive(timeout) == []
        return time.monotonic() - start

    assert seconds(0) < 0.05
    assert seconds(0.1) >= 0.1


def test_several_frames_and_a_part_of_one(pair: tuple[Pipe, socket.socket]) -> None:
    pipe, front = pair
    last = encode(cancel(3))
    front.sendall(encode(cancel(1)) + encode(cancel(2)) + last[:3])
    assert [frame.cancel.handle for frame in pipe.receive(1)] == [1, 2]
    front.sendall(last[3:])
    assert [frame.cancel.handle for frame in pipe.receive(1)] == [3]


def test_a_frame_larger_than_the_socket_buffer(pair: tuple[Pipe, socket.socket]) -> None:
    pipe, front = pair
    large = engine_pb2.EngineFrame(fatal=engine_pb2.EngineFatal(message="x" * 5_000_000))
    sender = threading.Thread(target=pipe.send, args=(large,))
    sender.start()
    reader = FrameReader()
    payloads: list[bytes] = []
    while not payloads:
        payloads = list(reader.feed(front.recv(65536)))
    sender.join(PATIENCE)
    assert engine_pb2.EngineFrame.FromString(payloads[0]) == large


def test_the_front_is_gone(pair: tuple[Pipe, socket.socket]) -> None:
    pipe, front = pair
    front.close()
    with pytest.raises(FrontGoneError):
        pipe.receive(1)
    with pytest.raises(FrontGoneError):
        pipe.send(engine_pb2.EngineFrame())


@pytest.mark.parametrize("garbage", [b"\x03\x00\x00\x00\xff\xff\xff", b"\xff\xff\xff\xff"])
def test_garbage_is_a_clear_failure(pair: tuple[Pipe, socket.socket], garbage: bytes) -> None:
    pipe, front = pair
    front.sendall(garbage)
    with pytest.raises(FrameError):
        pipe.receive(1)
