"""The download before a worker starts: what passes is tried again, what does not is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from moebius_worker.checkpoint import download
from moebius_worker.checkpoint.errors import CheckpointError
from moebius_worker.checkpoint.locate import Located


def test_a_hub_that_is_busy_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Located(Path("/there"), "a/b")
    answers: list[Located | CheckpointError] = [CheckpointError("busy"), CheckpointError("busy"), there]
    pauses: list[float] = []

    def locate(model: str, *, progress: object) -> Located:
        answer = answers.pop(0)
        if isinstance(answer, CheckpointError):
            raise answer
        return answer

    monkeypatch.setattr(download, "locate", locate)
    assert download.fetch("a/b", lambda *_: None, pauses.append) == there
    assert pauses == [5, 10]


def test_what_cannot_be_had_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    def locate(model: str, *, progress: object) -> Located:
        raise CheckpointError("there is none")

    monkeypatch.setattr(download, "locate", locate)
    with pytest.raises(CheckpointError, match="there is none"):
        download.fetch("a/b", lambda *_: None, pauses.append, tries=3)
    assert len(pauses) == 2


def test_a_model_that_is_there_is_not_downloaded(tmp_path: Path) -> None:
    # In a process of its own: it sets up logs for all of it.
    command = [sys.executable, "-m", "moebius_worker.checkpoint.download", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stderr.splitlines()[-1])
    assert (said["event"], said["path"]) == ("there", str(tmp_path))


def test_progress_is_told_every_few_seconds_and_at_the_end() -> None:
    now = 0.0
    progress = download.report(lambda: now)
    with capture_logs() as lines:
        for done in range(101):
            now = done / 10
            progress("downloading", done, 100)
    assert [line["percent"] for line in lines] == [0, 50, 100]
