import pytest

from moebius_proto.worker.v1 import engine_pb2 as pb
from moebius_worker.framing import MAX_FRAME_BYTES, FrameError, FrameReader, encode

FRAMES = [
    pb.EngineFrame(begin=pb.StepBegin(handles=[1, 2, 3])),
    pb.EngineFrame(),
    pb.EngineFrame(fatal=pb.EngineFatal(message="x" * 5000)),
]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 4096, 10**6])
def test_frames_survive_any_cut(piece: int) -> None:
    data = b"".join(map(encode, FRAMES))
    reader = FrameReader()
    payloads = [
        payload
        for start in range(0, len(data), piece)
        for payload in reader.feed(data[start : start + piece])
    ]
    assert [pb.EngineFrame.FromString(payload) for payload in payloads] == FRAMES


def test_an_impossible_length_is_refused_before_it_is_awaited() -> None:
    with pytest.raises(FrameError, match=str(MAX_FRAME_BYTES)):
        list(FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little")))
