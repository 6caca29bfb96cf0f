"""What `moebius up` lives through, and tells: a model that cannot chat, a dead worker, a dead controller.

The tests run in the order in which they are written; in the last one it dies itself.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.running_up import RunningUp, assert_gone, running_up
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def up(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    folder = tmp_path_factory.mktemp("survives")
    plain = shutil.copytree(tiny_model, folder / "plain")
    (plain / "tokenizer_config.json").write_text("{}")
    with running_up(plain, folder / "state", "--workers", "1") as running:
        running.says("Ctrl-C stops it")
        yield running


def test_a_model_without_chat_template_is_served_all_the_same(up: RunningUp) -> None:
    assert "Not answered: this model has no chat template" in up.output
    body = {"model": "plain", "prompt": "Once", "max_tokens": 4}
    answer = httpx.post(f"{up.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text


def ready(up: RunningUp, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Waits until the worker serves, in the next process after `before`'s; returns what status says."""

    def status() -> dict[str, Any] | None:
        view: dict[str, Any] = json.loads(up.command("status", "--json").stdout)
        last = view["events"][-1]
        next_one = before is None or last["run"] == before["events"][-1]["run"] + 1
        return view if next_one and last["what"] == "ready" else None

    found: dict[str, Any] = wait_for(status, "the worker is ready")
    return found


@pytest.mark.timed
def test_a_killed_worker_comes_back_and_it_is_told(up: RunningUp) -> None:
    before = ready(up)
    os.kill(before["workers"][0]["pid"], signal.SIGKILL)
    after = ready(up, before)
    assert after["gateway"]["pid"] == before["gateway"]["pid"]
    died, *later = after["events"][-3:]
    assert [died["what"], *(event["what"] for event in later)] == ["died", "started", "ready"]
    assert "SIGKILL" in died["reason"]
    up.says("worker-0 died: it was killed by SIGKILL", 10)
    # After that: the event of the start may have been told as well.
    wait_for(
        lambda: "worker-0 ready: its engine serves" in up.output.partition("worker-0 died")[2], "it is told"
    )


@pytest.mark.timed
def test_a_killed_controller_is_started_again_with_its_memory(up: RunningUp) -> None:
    """Its workers die with it: the next controller starts them anew, and knows what was before."""
    before = ready(up)
    os.kill(before["controller_pid"], signal.SIGKILL)
    after = ready(up, before)
    assert after["controller_pid"] != before["controller_pid"]
    assert after["gateway"]["pid"] == before["gateway"]["pid"]
    assert after["events"][: len(before["events"])] == before["events"]
    up.says("controller was killed by SIGKILL and is started again", 5)


def test_nothing_outlives_it(up: RunningUp) -> None:
    family = up.family()
    assert len(family) == 4, "gateway, controller, worker and engine"
    up.process.kill()
    assert up.ended() == -signal.SIGKILL
    assert_gone(family)
    assert up.command("status").returncode == 1, "its record is there, but it is not"
