"""The engine as a process, with the test as its front."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moebius_proto.worker.v1 import engine_pb2
from moebius_proto.worker.v1 import worker_pb2 as pb
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.engine.__main__ import last_word
from moebius_worker.engine.errors import EngineDownError
from moebius_worker.engine.memory import OutOfMemoryPlan
from moebius_worker.framing import FrameReader
from moebius_worker.settings import WorkerSettings
from tests.tiny import write_checkpoint
from tests.waiting import PATIENCE


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
    ours.settimeout(PATIENCE)
    with theirs, tempfile.TemporaryFile() as flights:
        descriptors = (theirs.fileno(), flights.fileno())
        flags = ("--fd", str(descriptors[0]), "--flights", str(descriptors[1]))
        as_json = WorkerSettings(model=str(model), **options).model_dump_json()
        process = subprocess.Popen(
            [sys.executable, "-m", "moebius_worker.engine", *flags, as_json], pass_fds=descriptors
        )
    try:
        with ours:
            yield Engine(process, ours)
            process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("engine") / "tiny")


def test_it_loads_serves_ignores_polite_signals_and_ends_on_what_it_cannot_understand(model: Path) -> None:
    with engine(model, max_running=64, max_step_tokens=24) as running:
        assert running.read_until("loading").loading.phase
        ready = running.read_until("ready").ready
        assert (ready.model.architecture, ready.model.device) == ("MixtralForCausalLM", "cpu")
        assert ready.stats.kv_pages_total > 0
        assert ready.stats.max_running == 24, "each that runs computes a token in each step"
        for number in (signal.SIGINT, signal.SIGTERM):
            running.process.send_signal(number)
        running.read_until("end")
        running.read_until("end")
        running.front.sendall(b"\x03\x00\x00\x00\xff\xff\xff")
        fatal = running.read_until("fatal").fatal
        assert "cannot be decoded" in fatal.message
        assert not fatal.permanent
    assert running.process.returncode == 1


def test_it_says_what_its_start_took(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with engine(model, log_format="json") as running:
        running.read_until("ready")
        running.front.close()
    lines = [line for text in capfd.readouterr() for line in text.splitlines() if "the start took" in line]
    [seconds] = [json.loads(line)["seconds"] for line in lines]
    assert seconds["starting PyTorch"] > 0.1
    assert seconds["rest"] >= 0


def test_it_ends_with_its_front_even_while_loading(model: Path) -> None:
    with engine(model) as running:
        running.read_until("loading")
        running.front.close()
    assert running.process.returncode == 0


@pytest.mark.parametrize(
    ("error", "reason", "permanent"),
    [
        (CheckpointError("no config.json"), pb.REASON_ENGINE_DEAD, True),
        (OutOfMemoryPlan("does not fit", permanent=True), pb.REASON_ENGINE_DEAD, True),
        (OutOfMemoryPlan("does not fit now", permanent=False), pb.REASON_ENGINE_DEAD, False),
        (EngineDownError(pb.REASON_GPU_FAULT, "Xid 79"), pb.REASON_GPU_FAULT, False),
        (ImportError("libtorch.so"), pb.REASON_ENGINE_DEAD, False),
    ],
)
def test_only_what_the_next_engine_would_find_too_is_permanent(
    error: Exception, reason: pb.Reason, permanent: bool
) -> None:
    fatal = last_word(error).fatal
    assert (fatal.reason, fatal.permanent) == (reason, permanent)
    assert str(error) in fatal.message


def test_a_checkpoint_that_is_not_there_is_reported_before_torch_is_imported() -> None:
    probe = "import sys, moebius_worker.engine.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], timeout=60).returncode == 0


def test_what_stands_by_has_touched_no_gpu() -> None:
    probe = """if True:
        import sys, torch
        def touched(*_):
            sys.exit("the GPU is touched")
        for module, name in ((torch.cuda, "_lazy_init"), (torch.cuda, "is_available"),
                             (torch.cuda, "device_count"), (torch._C, "_cuda_getDeviceCount")):
            setattr(module, name, touched)
        from moebius_worker.engine.serving import preload
        preload()
        assert "moebius_kernels.triton.experts" in sys.modules
    """
    assert subprocess.run([sys.executable, "-c", probe], timeout=60).returncode == 0
