"""The engine as a process, with the test as its front."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moebius_proto.worker.v1 import engine_pb2
from moebius_worker.framing import FrameReader
from moebius_worker.settings import WorkerSettings
from tests.tiny import write_checkpoint


@dataclass
class Engine:
    process: subprocess.Popen[bytes]
    front: socket.socket
    reader: FrameReader = field(default_factory=FrameReader)
    frames: list[engine_pb2.EngineFrame] = field(default_factory=list)

    def read_until(self, kind: str) -> engine_pb2.EngineFrame:
        """The first frame of this kind that has not been returned yet."""
        while True:
            for index, frame in enumerate(self.frames):
                if frame.WhichOneof("frame") == kind:
                    del self.frames[: index + 1]
                    return frame
            data = self.front.recv(65536)
            assert data, f"the engine ended without {kind}"
            self.frames += [engine_pb2.EngineFrame.FromString(payload) for payload in self.reader.feed(data)]


@contextmanager
def engine(model: Path, **settings: object) -> Iterator[Engine]:
    options = {"device": "cpu", "threads": 1, "kv_cache_memory": "2MiB"} | settings
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with theirs:
        flags = ("--fd", str(theirs.fileno()), WorkerSettings(model=str(model), **options).model_dump_json())
        process = subprocess.Popen(
            [sys.executable, "-m", "moebius_worker.engine", *flags], pass_fds=[theirs.fileno()]
        )
    try:
        with ours:
            yield Engine(process, ours)
            process.wait(10)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "tiny")


def test_it_loads_serves_ignores_polite_signals_and_ends_with_its_front(model: Path) -> None:
    with engine(model) as running:
        assert running.read_until("loading").loading.phase
        ready = running.read_until("ready").ready
        assert (ready.model.architecture, ready.model.device) == ("MixtralForCausalLM", "cpu")
        assert ready.stats.kv_pages_total > 0
        for number in (signal.SIGINT, signal.SIGTERM):
            running.process.send_signal(number)
        running.read_until("end")
        running.read_until("end")
        running.front.close()
    assert running.process.returncode == 0


def test_what_cannot_be_understood_ends_it_with_a_word(model: Path) -> None:
    with engine(model) as running:
        running.read_until("ready")
        running.front.sendall(b"\x03\x00\x00\x00\xff\xff\xff")
        fatal = running.read_until("fatal").fatal
        assert "cannot be decoded" in fatal.message
        assert not fatal.permanent
    assert running.process.returncode == 1


def test_what_the_next_engine_would_find_too_is_permanent(model: Path) -> None:
    with engine(model, kv_cache_memory="100TiB") as running:
        fatal = running.read_until("fatal").fatal
        assert "--kv-cache-memory" in fatal.message
        assert fatal.permanent
    assert running.process.returncode == 1
